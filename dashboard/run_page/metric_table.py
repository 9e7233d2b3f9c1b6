"""Every metric of a run: distributions with their percentiles, and what is one number, with bands and definitions."""

from __future__ import annotations

import streamlit as st

from dashboard.run_page.metric_rows import distribution_rows, scalar_rows
from traces.recording import Recording
from traces.run_metrics import RunMetrics


def metric_table(recording: Recording, metrics: RunMetrics) -> None:
    """What the recording cannot tell is left out."""
    st.dataframe(distribution_rows(metrics), hide_index=True, height="content")
    wide = {"definition": st.column_config.TextColumn(width="large")}
    st.dataframe(scalar_rows(recording.run, metrics), hide_index=True, height="content", column_config=wide)
