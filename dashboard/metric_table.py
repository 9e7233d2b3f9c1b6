"""Every metric of a run: distributions with their percentiles, and what is one number, with bands and definitions."""

from __future__ import annotations

from typing import Any

import streamlit as st

from dashboard.run_header import bands_of
from dashboard.shown import shown
from serving.metrics import metric
from traces.recording import Recording
from traces.run_metrics import RunMetrics

_STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")


def metric_table(recording: Recording, metrics: RunMetrics) -> None:
    """What the recording cannot tell is left out."""
    bands = bands_of(recording.run)
    st.dataframe(_distributions(metrics), hide_index=True, height="content")
    rows: list[dict[str, Any]] = []
    for name, value in metrics.scalars().items():
        if value is None:
            continue
        about = metric(name.removesuffix("_peak"))
        band = bands.get(name, {}).get("value")
        rows.append(
            {
                "metric": about.read_as + (" at its peak" if name.endswith("_peak") else ""),
                "value": shown(about.read(value)),
                "90 % band": "–".join(shown(about.read(end)) for end in band) if band else "",
                "definition": about.definition,
            }
        )
    wide = {"definition": st.column_config.TextColumn(width="large")}
    st.dataframe(rows, hide_index=True, height="content", column_config=wide)


def _distributions(metrics: RunMetrics) -> list[dict[str, Any]]:
    rows = []
    for name, found in metrics.distributions().items():
        if found.count:
            about, numbers = metric(name), found.as_dict()
            cells = {statistic: shown(about.read(numbers[statistic])) for statistic in _STATISTICS}
            rows.append({"metric": about.read_as, **cells, "values": found.count})
    return rows
