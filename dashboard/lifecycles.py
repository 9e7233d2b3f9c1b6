"""Four lifecycles: the same run as its tokens, its steps, its memory and its requests saw it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import streamlit as st

from dashboard import run_charts
from dashboard.library import stamp
from dashboard.loading import open_run, run_colour
from dashboard.numbers import percent, shown
from dashboard.series import column
from serving.metrics import metric
from traces.recording import Recording
from traces.run_metrics import RunMetrics

CARD_PX = 272
_BARE = {"displayModeBar": False}
_HELP = "The same run as its tokens, its steps, its memory and its requests saw it."

Cell = tuple[str, Any, str]


def lifecycles(recording: Recording, metrics: RunMetrics) -> None:
    """A card each, two abreast on a narrow page."""
    st.subheader("Four lifecycles", anchor=False, help=_HELP)
    figures = _figures(str(recording.path), stamp(recording.path))
    with st.container(horizontal=True, gap="small"):
        for title, cells in _cells(metrics).items():
            with st.container(border=True, width=CARD_PX, key=f"card-{title}"):
                _card(title, cells)
                st.plotly_chart(figures[title], key=title, config=_BARE)


def _cells(metrics: RunMetrics) -> dict[str, list[Cell]]:
    s = metrics.scalars()
    steps, queue = (metrics.distribution(name) for name in ("step_ms", "queue_ms"))
    gaps = gaps_of(metrics)
    spread = metrics.distribution(gaps)
    return {
        "Token": [
            (f"{metric(gaps).label} p50 (ms)", spread.p50, gaps),
            (f"{metric(gaps).label} p99 (ms)", spread.p99, gaps),
            ("input (tok/s)", s["input_throughput"], "input_throughput"),
            ("output (tok/s)", s["output_throughput"], "output_throughput"),
        ],
        "Compute": [
            ("step p50 (ms)", steps.p50, "step_ms"),
            ("step p99 (ms)", steps.p99, "step_ms"),
            ("tokens/step", metrics.distribution("batch_tokens").mean, "batch_tokens"),
            ("busy (%)", percent(s["busy"]), "busy"),
        ],
        "Memory": [
            ("KV mean (%)", percent(s["kv_usage"]), "kv_usage"),
            ("KV peak (%)", percent(s["kv_usage_peak"]), "kv_usage"),
            ("prefix hits (%)", percent(s["prefix_hit_rate"]), "prefix_hit_rate"),
            ("preemptions", s["preemptions"], "preemptions"),
        ],
        "Request": [
            ("queue p50 (ms)", queue.p50, "queue_ms"),
            ("queue p99 (ms)", queue.p99, "queue_ms"),
            ("requests/s", s["request_throughput"], "request_throughput"),
            ("peak at once", s["concurrency_peak"], "concurrency"),
        ],
    }


def gaps_of(metrics: RunMetrics) -> str:
    """ITL where token times were kept, else TPOT."""
    return "itl_ms" if metrics.distribution("itl_ms").count else "tpot_ms"


def _card(title: str, cells: list[Cell]) -> None:
    st.markdown(f"**{title}**")
    for begin in (0, 2):
        for cell, (text, value, name) in zip(st.columns(2), cells[begin : begin + 2], strict=True):
            cell.metric(text, shown(value), help=metric(name).help)


@st.cache_resource(max_entries=16, show_spinner=False)
def _figures(directory: str, stamp: int) -> dict[str, go.Figure]:
    recording, metrics = open_run(Path(directory))
    colour = run_colour(recording)
    of, gaps = metrics.values, gaps_of(metrics)
    prefill = np.nan_to_num(column(recording.table("steps", ["prefill_tokens"]), "prefill_tokens"))
    return {
        "Token": run_charts.histogram(of(gaps), gaps, colour),
        "Compute": run_charts.step_times(of("batch_tokens"), of("step_ms"), prefill, colour),
        "Memory": run_charts.memory_shares(of("kv_usage"), of("kv_pressure"), of("step_ms"), colour),
        "Request": run_charts.phases(of("queue_ms"), of("prefill_ms"), of("decode_ms"), colour),
    }
