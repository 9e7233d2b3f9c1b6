"""The requests of a run: a table of the slowest, and the waterfall of one of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import streamlit as st
from numpy.typing import NDArray

from tokentwin.calibration.validation.evidence import trust_in_recording
from tokentwin.dashboard.blocks import choosing, data_table, figure
from tokentwin.dashboard.palette import run_colour
from tokentwin.dashboard.run_page import charts as run_charts
from tokentwin.dashboard.run_page.time_window import Window
from tokentwin.dashboard.series import column
from tokentwin.dashboard.slos import Bounds
from tokentwin.dashboard.url import choose, keep, named
from tokentwin.planning.run_report import status_word
from tokentwin.serving.answers.figures import shown_time
from tokentwin.serving.metrics import metric
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.recording import Recording

ROWS = 1000

_MOST_STEPS = 200_000  # maximum number of steps; in a longer run it takes too long to find the steps of one request
_SHOWN = ("ttft_ms", "tpot_ms", "e2e_ms", "queue_ms", "prefill_ms", "decode_ms", "preempted_ms")
_REQUEST_COLUMNS = ["request_id", "status", "arrival_ns", "finish_ns", "prompt_tokens", "output_tokens", "preemptions"]
_WATERFALL_COLUMNS = [
    *_REQUEST_COLUMNS,
    "replica",
    "reason",
    "scheduled_ns",
    "first_token_ns",
    "prefix_hit_tokens",
    "preempted_ns",
    "token_times_ns",
]


def request_table(recording: Recording, metrics: RunMetrics, window: Window | None, bounds: Bounds) -> None:
    """Draw the slowest requests of the window by a chosen metric, and the waterfall of the selected request."""
    heading, order = st.columns([3, 1], vertical_alignment="bottom")
    with order:
        slowest_by = choose("Slowest by", _SHOWN, "by", show=lambda name: metric(name).axis)
    requests = recording.table("requests", _REQUEST_COLUMNS)
    arrival, finish = column(requests, "arrival_ns") / 1e9, column(requests, "finish_ns") / 1e9
    inside = np.ones(requests.num_rows, dtype=bool)
    if window is not None:
        inside = (arrival <= window[1]) & ~(finish < window[0])
    rows = slowest(metrics.values(slowest_by), np.flatnonzero(inside), ROWS)
    with heading:
        st.header("Requests", anchor=False)
        count = f"the {len(rows):,} slowest of {int(inside.sum()):,}" if inside.sum() > ROWS else f"all {len(rows):,}"
        within = "" if window is None else " in the time window"
        st.caption(f"Showing {count} requests{within}. Select one to see where its time went.")
    if not len(rows):
        st.info("No request ran in this time window.", icon=":material/filter_alt_off:")
        return
    chosen = requests.take(pa.array(rows))
    columns: dict[str, Any] = {
        "request": chosen["request_id"].to_numpy(),
        "status": [status_word(status) for status in chosen["status"].to_pylist()],
        "arrival (s)": arrival[rows],
        "prompt": chosen["prompt_tokens"].to_numpy(),
        "output": chosen["output_tokens"].to_numpy(),
        **{_heading(name): metrics.values(name)[rows] for name in _SHOWN},
        "preemptions": chosen["preemptions"].to_numpy(),
    }
    formats = {"arrival (s)": "%.2f", **{_heading(name): "%.1f" for name in _SHOWN}}
    helps = {_heading(name): metric(name).help for name in _SHOWN}
    selectable = choosing("request", columns["request"], f"requests-{recording.path}-{slowest_by}")
    data_table(columns, formats, helps, height=270, **selectable)
    at = _linked(columns["request"])
    keep("request", str(columns["request"][at]), str(columns["request"][0]))
    _waterfall(recording, metrics, int(rows[at]), bounds)


def slowest(values: NDArray[Any], rows: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Return at most `most` of `rows`, highest value first; rows without a value come last, ties keep their order."""
    order = -np.where(np.isnan(values[rows]), -1.0, values[rows])
    if len(rows) > most:
        near = order <= np.partition(order, most - 1)[most - 1]
        rows, order = rows[near], order[near]
    return rows[np.argsort(order, kind="stable")][:most]


def _heading(name: str) -> str:
    return metric(name).axis.replace(" time", "")


def _linked(ids: np.ndarray[Any, Any]) -> int:
    """Return the row of the request that the URL names, or the first."""
    rows = np.flatnonzero(ids.astype(str) == (named("request") or ""))
    return int(rows[0]) if len(rows) else 0


def _waterfall(recording: Recording, metrics: RunMetrics, row: int, bounds: Bounds) -> None:
    request = _row(recording, row)
    intervals: list[tuple[int, int]] = []
    preempted = request["preempted_ns"] or 0
    if request["preemptions"]:
        steps = recording.table("steps", ["replica", "plan_ns", "start_ns", "row_ids", "preempted_ids"])
        if steps.num_rows <= _MOST_STEPS:
            intervals = run_charts.preempted_intervals(steps, request["request_id"], request["replica"])
    facts = [
        status_word(request["status"]) + (f" ({request['reason']})" if request["reason"] else ""),
        f"{request['prompt_tokens'] or 0:,} prompt tokens, {request['prefix_hit_tokens'] or 0:,} of them cached",
        f"{request['output_tokens'] or 0:,} output tokens",
        *(
            f"{metric(name).label} {shown_time(metrics.values(name)[row])}"
            for name in ("ttft_ms", "tpot_ms", "e2e_ms")
            if np.isfinite(metrics.values(name)[row])
        ),
    ]
    if request["preemptions"]:
        where = "" if intervals else " (the recording does not say when)"
        times = "once" if request["preemptions"] == 1 else f"{request['preemptions']} times"
        facts.append(f"preempted {times}, for {shown_time(preempted / 1e6)}{where}")
    with st.container():
        above = st.container()
        st.caption(" · ".join(facts))
        drawn = run_charts.waterfall(request, run_colour(recording.run), intervals, bounds)
        name, trust = f"Request {request['request_id']}", trust_in_recording(recording)
        figure(drawn, "waterfall", name, trust, place=above, small=True)


def _row(recording: Recording, row: int) -> dict[str, Any]:
    """Return one request with its tokens; only its row group is read."""
    ends = np.cumsum(recording.group_rows("requests"))
    group = int(np.searchsorted(ends, row, side="right"))
    first = int(ends[group - 1]) if group else 0
    request: dict[str, Any] = (
        recording.table("requests", _WATERFALL_COLUMNS, [group]).slice(row - first, 1).to_pylist()[0]
    )
    return request
