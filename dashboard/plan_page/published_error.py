"""How far predictions are off, said beside an answer: those of published engines, on the same GPU if there are any."""

from __future__ import annotations

from pathlib import Path

from dashboard.shown import literal
from dashboard.trust_page.external_results import External, covered, median_error_pct, newest_external
from serving.errors import UserError
from serving.metrics import metric

_FAMILIES = ("ttft_ms", "tpot_ms")


def published_error(runs: Path, gpu: str) -> None:
    """The line; nothing where results are damaged, of which the Trust page tells."""
    import streamlit as st  # a report says it without

    try:
        told = error_line(newest_external(runs), gpu)
    except UserError:
        return
    if told:
        st.caption(f"{literal(told)} [See Trust](trust)")


def error_line(external: External, gpu: str) -> str:
    """Simulated against real, in a sentence: median errors of blind predictions, and how many the 90 % band holds.

    Of the published runs on `gpu`, or of all where there are none on it. Empty when none has such a figure.
    """
    nearest = external.on(gpu)
    where = f"on {gpu}" if nearest else f"on other GPUs (there is none on {gpu})"
    kept = nearest or external
    medians = {name: median_error_pct(kept, name) for name in _FAMILIES}
    told = [
        f"{error:.1f}\N{NO-BREAK SPACE}% for {metric(name).label}"
        for name, error in medians.items()
        if error is not None
    ]
    if not told:
        return ""
    runs = sum(len({row.run for row in case.rows}) for case in kept.cases)
    return (
        f"The simulator was compared with {runs:,} published runs {where} that it had not seen. Its median error is "
        f"{' and '.join(told)}. Its 90 % band holds "
        f"{100 * covered(kept) / len(kept.rows):.0f}\N{NO-BREAK SPACE}% of the measured values."
    )
