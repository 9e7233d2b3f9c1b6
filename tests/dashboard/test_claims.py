"""The Claims page shows every bundled claim as its file states it, and checks what a reader sets."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("streamlit")

from lab.claims.claim import Claim, load_claims
from lab.claims.page import page as as_markdown
from tests.dashboard.pages import opened
from tokentwin.dashboard.claims_page.page import CLAIMS
from tokentwin.dashboard.claims_page.tasks import check_claim
from tokentwin.planning import checkout
from tokentwin.planning.claims.document import ClaimsDocument
from tokentwin.planning.jobs.job import Job
from tokentwin.serving.deployments.config import parse

DRAFTS = "deployment.scheduler.speculative"


page = partial(opened, "claims")


def test_the_bundled_answer_is_of_the_bundled_claims() -> None:
    """`tokentwin claims --save dashboard/samples/claims.json --force --write lab/results/claims.md` makes both."""
    answer = ClaimsDocument.read(json.loads(CLAIMS.read_text()))
    claims = load_claims()
    assert [claim.name for claim in answer.claims] == list(claims)
    for claim in answer.claims:
        asked = claims[claim.name]
        assert (claim.claim, claim.means, claim.learnt) == (asked.claim, asked.means, asked.learnt)
        assert (claim.least, claim.most) == (asked.expects.least, asked.expects.most)
        assert [case.when for case in claim.cases] == [case.when for case in asked.cases]
    assert (Path(__file__).parents[2] / "lab" / "results" / "claims.md").read_text() == as_markdown(answer)


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
    case = ClaimsDocument.read(check_claim(began[0], tmp_path, lambda stage, share: None)).claims[0].cases[0]
    assert case.value == pytest.approx(32 * 2 * 8 * 128 * 2 * 8192 / 1e9)


@pytest.mark.parametrize(
    ("name", "label", "keys"),
    [
        (
            "speculative-decoding",
            "change: Fraction of draft tokens that are accepted",
            ("change", DRAFTS, "acceptance_rate"),
        ),
        ("continuous-batching", "TPOT SLO (ms)", ("slo", "tpot_ms")),
        ("chunked-prefill", "Tokens per prompt (2)", ("offered", "traffic", 1, "prompt", "tokens")),
        ("quadratic-attention", "baseline: Tokens per sequence", ("baseline", "tokens")),
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


def test_without_a_checkout_the_answers_are_shown_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkout, "_ROOT", tmp_path)
    app = page(tmp_path)
    assert not app.exception and len(app.get("plotly_chart")) >= 1 and not app.button
    assert any("in a checkout of the repository" in caption.value for caption in app.caption)
