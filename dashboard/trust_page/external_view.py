"""The Trust page on engines nobody here wrote: what was published, what is predicted of it, and how far off that is."""

from __future__ import annotations

from typing import get_args

import streamlit as st

from dashboard.blocks import figure, table
from dashboard.shown import when
from dashboard.trust_page.external_charts import errors_by_source
from dashboard.trust_page.external_results import Column, External, Source, provenance, source_row
from dashboard.url import pick
from serving.metrics import METRICS

_COLUMN = {"blind": "Blind", "anchored": "Anchored"}


_HELP = (
    "Public measurements of vLLM, simulated with the engine's own settings. *Blind* predictions use kernel tables and "
    "runs of other sources only. *Anchored* predictions fit a factor or two on one run of the source, which the score "
    "leaves out. A dot is the error of one figure; a triangle at the edge is farther off."
)


def show_external(external: External) -> None:
    """Errors by source over their targets, then every source and every figure as tables."""
    with st.container():
        column = _errors(external)
    _tables(external, column)


def _errors(external: External) -> Column:
    """The figure, and the prediction that was chosen for it."""
    above, chooser = st.columns([3, 1], vertical_alignment="bottom")
    with chooser:
        chosen = pick("Prediction", list(get_args(Column)), "prediction", show=_COLUMN.__getitem__)
    column: Column = "anchored" if chosen == "anchored" else "blind"
    shown = [case for case in external.cases if any(row.error_pct(column) is not None for row in case.rows)]
    plot = errors_by_source(shown, column)
    figure(plot, "external", "Published engines, predicted", provenance(shown), _HELP, place=above)
    return column


def _tables(external: External, column: Column) -> None:
    table(
        [source_row(case, column) for case in external.cases],
        dict.fromkeys(("TTFT", "TPOT", "E2E", "in 90 % band"), "%.1f %%"),
        columns={"source": st.column_config.TextColumn(width="medium")},
    )
    st.caption(
        f"TTFT, TPOT and E2E are median absolute errors of {column} predictions. Made by `tokentwin validate "
        f"external`, {when(external.created) or 'undated'}."
    )
    targets, figures = st.columns(2)
    with targets.expander("Targets"):
        table([row for case in external.cases for row in _targets(case)])
    with figures.expander("Every figure"):
        table([row for case in external.cases for row in _figures(case)])


def _targets(case: Source) -> list[dict[str, object]]:
    return [
        {
            "run": case.name,
            "prediction": target.column,
            "figure": target.figure,
            "within (%)": target.within_pct,
            "error (%)": round(target.error_pct, 1),
            "at": target.at,
            "met": target.met,
        }
        for target in case.targets
    ]


def _figures(case: Source) -> list[dict[str, object]]:
    return [
        {
            "source": case.name,
            "run": row.run,
            "figure": _figure(row.figure),
            "measured": row.measured,
            "blind": row.blind,
            "error (%)": round(row.blind_error_pct, 1),
            "from": row.low,
            "to": row.high,
            "anchored": row.anchored,
            "anchored error (%)": None if row.anchored_error_pct is None else round(row.anchored_error_pct, 1),
            "floor (%)": row.floor_pct,
        }
        for row in case.rows
    ]


def _figure(name: str) -> str:
    metric, _, statistic = name.partition(".")
    return f"{METRICS[metric].axis} {statistic}".rstrip() if metric in METRICS else name
