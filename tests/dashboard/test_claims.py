"""The Claims page shows every bundled claim as its file states it."""

import json
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("streamlit")

from lab.claims.claim import load_claims
from lab.claims.page import page as as_markdown
from tests.dashboard.pages import opened
from tokentwin.dashboard.claims_page.page import CLAIMS
from tokentwin.planning.claims.document import ClaimsDocument

page = partial(opened, "claims")


def test_the_bundled_answer_is_of_the_bundled_claims() -> None:
    """`python -m lab.claims --save dashboard/samples/claims.json --force --write lab/results/claims.md` makes both."""
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
