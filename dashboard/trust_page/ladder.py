"""The ladder as cards."""

from __future__ import annotations

import streamlit as st

from calibration.validation.report import ValidationReport
from dashboard.prose import literal
from dashboard.trust_page.external_results import External
from dashboard.trust_page.rungs import rungs


def show_ladder(report: ValidationReport | None, external: External | None) -> None:
    """Rungs 1 to 5, three and two in a row, so that they stay readable at 800 pixels."""
    found = rungs(report, external)
    for row in (found[:3], found[3:]):
        for place, rung in zip(st.columns(len(row), gap="small"), row, strict=True):
            with place.container(border=True, height="stretch"):
                st.markdown(f"**{rung.title}**")
                if rung.headline:
                    st.markdown(f":{rung.colour}[:material/{rung.symbol}:] {rung.headline}")
                st.caption(literal(rung.detail))
