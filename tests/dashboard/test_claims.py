"""The Claims page: every bundled claim is there as its file has it, and what a reader sets is what is checked."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("streamlit")

from dashboard.claims_page.page import CLAIMS
from dashboard.claims_page.tasks import check_claim
from planning.claims.claim import Claim, load_claims
from planning.claims.document import ClaimsDocument
from planning.jobs.job import Job
from serving.deployments.config import parse
from tests.dashboard.pages import opened

DRAFTS = "deployment.scheduler.speculative"


page = partial(opened, "claims")


def test_the_bundled_answer_is_of_the_bundled_claims() -> None:
    """`tokentwin claims --save dashboard/samples/claims.json --force --write docs/claims.md` makes both."""
    answer = ClaimsDocument.read(json.loads(CLAIMS.read_text()))
    claims = load_claims()
    assert [claim.name for claim in answer.claims] == list(claims)
    for claim in answer.claims:
        assert (claim.claim, claim.means) == (claims[claim.name].claim, claims[claim.name].means)
        assert [case.when for case in claim.cases] == [case.when for case in claims[claim.name].cases]
    assert (Path(__file__).parents[2] / "docs" / "claims.md").read_text() == answer.page()


def test_every_claim_has_its_page(tmp_path: Path) -> None:
    app = page(tmp_path)
    for name, claim in load_claims().items():
        app.selectbox[0].set_value(name).run()
        assert not app.exception, (name, app.exception[0].message)
        assert claim.claim in app.selectbox[0].options
        assert len(app.get("plotly_chart")) == 1 + claim.terms * len(claim.cases)
        assert app.button[0].label == "Check"


def test_what_is_set_is_what_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[dict[str, Any]] = []
    monkeypatch.setattr(Job, "start", lambda job: began.append(job.settings))
    app = page(tmp_path, claim="kv-of-a-70b")
    model = next(box for box in app.selectbox if box.label == "Model")
    model.set_value("Llama-3.1-8B").run()
    app.button[0].click().run()
    found = ClaimsDocument.read(check_claim(began[0], tmp_path, lambda stage, share: None)).claims[0].cases[0]
    assert found.value == pytest.approx(32 * 2 * 8 * 128 * 2 * 8192 / 1e9)


@pytest.mark.parametrize(
    ("name", "label", "keys"),
    [
        ("speculative-decoding", "change: Share of drafts accepted", ("change", DRAFTS, "acceptance_rate")),
        ("continuous-batching", "TPOT must be below (ms)", ("slo", "tpot_ms")),
        ("chunked-prefill", "Tokens of a prompt (2)", ("offered", "traffic", 1, "prompt", "tokens")),
        ("quadratic-attention", "baseline: Tokens of a sequence", ("baseline", "tokens")),
    ],
)
def test_any_number_of_a_claim_can_be_moved(name, label, keys, tmp_path, monkeypatch):
    began: list[dict[str, Any]] = []
    monkeypatch.setattr(Job, "start", lambda job: began.append(job.settings))
    app = page(tmp_path, claim=name)
    number = next(box for box in app.number_input if box.label == label)
    value = number.value
    number.set_value(value / 2 if isinstance(value, float) else value + 1).run()
    app.button[0].click().run()
    assert not app.exception
    node = parse(Claim, began[0]["claim"], "claim").experiment
    for key in keys:
        node = node[key]
    assert node == (value / 2 if isinstance(value, float) else value + 1)
