"""Claims: tests of common claims about inference."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType

import streamlit as st

from tokentwin.calibration.trust import Trust
from tokentwin.dashboard.blocks import data_table, figure, titled
from tokentwin.dashboard.bundled import SAMPLES
from tokentwin.dashboard.claims_page.charts import cases_chart, terms_chart
from tokentwin.dashboard.downloads import downloads
from tokentwin.dashboard.planned import Ways, planned, strip
from tokentwin.dashboard.shown import capitalised, literal
from tokentwin.dashboard.url import choose, in_url
from tokentwin.planning.claims.document import CheckedClaim, ClaimsDocument

CLAIMS = SAMPLES / "claims.json"
_WORST = ("extrapolated", "interpolated", "validated", "")


@in_url
def show(runs: Path, ways: Ways = MappingProxyType({})) -> None:
    """Draw the page, over the bundled answer."""
    strip(runs, planned(runs), ways, "Claims")
    answer = ClaimsDocument.read(json.loads(CLAIMS.read_text()))
    checked = {claim.name: claim for claim in answer.claims}
    sentences = {name: claim.claim for name, claim in checked.items()}
    with titled("Common claims about LLM inference", (1, 1)):
        name = choose("Claim", list(checked), "claim", show=lambda name: sentences.get(name, name))
    downloads(answer, "claims")
    _results(checked[name])
    with st.expander("All claims"):
        rows = [{"claim": c.claim, "expected": c.expected, "verdict": c.verdict} for c in checked.values()]
        data_table(rows)


def _results(checked: CheckedClaim) -> None:
    st.markdown(f"“{literal(checked.claim)}”")
    st.header(literal(capitalised(checked.verdict)), anchor=False)
    st.caption(f"{literal(checked.means)} Expected: {checked.expected}.")
    worst = min(checked.cases, key=lambda case: _WORST.index(case.level) if case.level in _WORST else 0)
    figure(
        cases_chart(checked),
        "cases",
        "Results of each case",
        Trust(worst.level, worst.reason),
        marked=True,
    )
    for at, case in enumerate(checked.cases):
        if case.terms:
            known = Trust(case.level, case.reason)
            figure(terms_chart(case.terms), f"terms-{at}", f"The parts of E2E when {case.when}", known)
    for text in (checked.break_even, checked.learnt):
        if text:
            st.markdown(literal(text))
    if checked.engine is not None:
        st.markdown(f"**{literal(checked.engine.number)}** {literal(checked.engine.sentence)}.")
