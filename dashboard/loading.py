"""What pages read from disk, kept between reruns until a file changes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import streamlit as st
from numpy.typing import NDArray

from dashboard.library import stamp
from dashboard.palette import CLOCK, NEUTRAL
from traces.recording import Recording
from traces.run_metrics import RunMetrics

COMPARED = ("ttft_ms", "tpot_ms", "e2e_ms")


def open_run(directory: Path) -> tuple[Recording, RunMetrics]:
    """A recording and its metrics. Raises UserError when it is damaged."""
    return _open_run(str(directory), stamp(directory) if directory.is_dir() else 0)


def compared_values(directory: Path) -> Mapping[str, NDArray[Any]]:
    """The latencies that the Trust page compares, one value a request."""
    _, metrics = open_run(directory)
    return {name: metrics.values(name) for name in COMPARED}


def run_colour(recording: Recording) -> str:
    """Blue for a simulated run, orange for a real one."""
    return CLOCK.get(recording.run["clock"], NEUTRAL)


@st.cache_resource(max_entries=8, show_spinner="Reading the recording")
def _open_run(directory: str, stamp: int) -> tuple[Recording, RunMetrics]:
    recording = Recording.load(directory)
    metrics = RunMetrics.of(recording)
    metrics.values("e2e_ms")
    return recording, metrics
