"""The Trust page on engines nobody here wrote: what was published, what is predicted of it, and how far off that is."""

from __future__ import annotations

from typing import get_args

import streamlit as st

from dashboard.blocks import figure, table
from dashboard.shown import when
from dashboard.trust_page.external_charts import errors_by_source
from dashboard.trust_page.external_results import Column, External, provenance, source_row
from dashboard.url import pick

_COLUMN = {"blind": "Blind", "anchored": "Anchored"}


_HELP = (
    "Public measurements of vLLM, simulated with the engine's own settings. *Blind* predictions use kernel tables and "
    "runs of other sources only. *Anchored* predictions fit a factor or two on one run of the source, which the score "
    "leaves out. A dot is the error of one figure; a triangle at the edge is farther off."
)


def show_external(external: External) -> None:
    """Errors by source over their targets, then a row for each source."""
    above, chooser = st.columns([3, 1], vertical_alignment="bottom")
    with chooser:
        chosen = pick("Prediction", list(get_args(Column)), "prediction", show=_COLUMN.__getitem__)
    column: Column = "anchored" if chosen == "anchored" else "blind"
    shown = [case for case in external.cases if any(row.error_pct(column) is not None for row in case.rows)]
    plot = errors_by_source(shown, column)
    figure(plot, "external", "Published engines, predicted", provenance(shown), _HELP, place=above)
    table(
        [source_row(case, column) for case in external.cases],
        dict.fromkeys(("TTFT", "TPOT", "E2E", "in 90 % band"), "%.1f %%"),
        columns={"source": st.column_config.TextColumn(width="medium")},
    )
    st.caption(
        f"TTFT, TPOT and E2E are median absolute errors of {column} predictions. Made by `tokentwin validate "
        f"external`, {when(external.created) or 'undated'}."
    )
