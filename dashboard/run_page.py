"""Run: what one recorded run did over time, and what each of its requests went through."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pyarrow as pa
import streamlit as st

from dashboard import run_charts
from dashboard.library import RECORDING, find, stamp
from dashboard.loading import open_run
from dashboard.palette import CLOCK, CLOCK_NAME, NEUTRAL
from dashboard.series import column
from dashboard.url import choose, interval
from serving.errors import UserError
from serving.metrics import metric
from traces.recording import Recording
from traces.run_metrics import RunMetrics

ROWS = 1000
_SHOWN = ("ttft_ms", "tpot_ms", "e2e_ms", "queue_ms", "prefill_ms", "decode_ms", "preempted_ms")
_BAR = {"displaylogo": False, "modeBarButtonsToRemove": ["lasso2d", "select2d", "autoScale2d"]}
_SATURATION = {"STABLE": "green", "BACKLOGGED": "orange", "OVERLOADED": "red"}


def show(runs: Path) -> None:
    """The page, over the recordings under `runs`."""
    recordings = find(runs, RECORDING)
    if not recordings:
        _nothing(runs)
        return
    title, chooser = st.columns([2, 1], vertical_alignment="bottom")
    with chooser:
        name = choose("Recording", list(recordings), "run")
    try:
        recording, metrics = open_run(recordings[name])
        with title:
            _header(recording.run, metrics)
        _body(recording, metrics)
    except UserError as error:
        st.error(str(error), icon=":material/error:")


def _body(recording: Recording, metrics: RunMetrics) -> None:
    run = recording.run
    if run["status"] == "interrupted":
        st.warning("This run was interrupted; the page shows what there was.", icon=":material/warning:")
    _headline(metrics)
    window = _timeline(recording, run)
    _lifecycles(recording, metrics)
    _requests(recording, metrics, window)
    _provenance(run)


def _nothing(runs: Path) -> None:
    st.title("A run, step by step", anchor=False)
    st.info(f"No recording under `{runs}` yet.", icon=":material/timeline:")
    st.markdown("A recording is a directory that the real engine or the simulator writes. The quickest way to several:")
    st.code("tokentwin demo", language="bash")
    st.markdown("Or record a trace of your own on the real engine, or run it through the simulator:")
    st.code("tokentwin bench --help\ntokentwin simulate --help", language="bash")


def _header(run: Mapping[str, Any], metrics: RunMetrics) -> None:
    clock = CLOCK_NAME.get(run["clock"], "unknown clock")
    colour = {"real": "orange", "simulated": "blue"}.get(clock, "gray")
    verdict = metrics.saturation
    badges = f":{colour}-badge[{clock}]"
    why = None
    if verdict is not None:
        badges += f" :{_SATURATION[verdict.verdict]}-badge[{verdict.verdict.lower()}]"
        why = (
            f"The backlog changes by {verdict.slope:+.3g} requests/s (95 %: {verdict.low:+.3g} to {verdict.high:+.3g}) "
            f"while {verdict.arrival_rate:.3g} requests/s arrive; requests wait {100 * verdict.waiting_share:.0f} % of "
            f"the time.\n\n{metric('saturation').help}"
        )
    st.title(run["workload"] or "A run", anchor=False)
    engines = f"{run['replicas']} replicas" if (run["replicas"] or 1) > 1 else "1 replica"
    statuses = ", ".join(f"{count:,} {status}" for status, count in metrics.statuses().items())
    st.markdown(f"{badges} {statuses} · {engines} · {(run['duration_ns'] or 0) / 1e9:,.1f} s", help=why)


def _headline(metrics: RunMetrics) -> None:
    s = metrics.scalars()
    ttft, tpot, e2e = (metrics.distribution(name) for name in ("ttft_ms", "tpot_ms", "e2e_ms"))
    cells = [
        ("TTFT p50 (ms)", ttft.p50, "ttft_ms"),
        ("TTFT p99 (ms)", ttft.p99, "ttft_ms"),
        ("TPOT p50 (ms)", tpot.p50, "tpot_ms"),
        ("TPOT p99 (ms)", tpot.p99, "tpot_ms"),
        ("E2E p99 (ms)", e2e.p99, "e2e_ms"),
        ("output (tokens/s)", s["output_throughput"], "output_throughput"),
        ("concurrency (mean)", s["concurrency"], "concurrency"),
    ]
    for cell, (text, value, name) in zip(st.columns(len(cells)), cells, strict=True):
        cell.metric(text, _number(value), help=metric(name).help)


def _timeline(recording: Recording, run: Mapping[str, Any]) -> tuple[float, float] | None:
    heading, slider = st.columns([1, 1], vertical_alignment="bottom", gap="large")
    with heading:
        st.subheader(
            "Over time",
            anchor=False,
            help="\n\n".join(metric(name).help for name in ("waiting", "running", "kv_usage", "batch_tokens")),
        )
    end = round(max((run["duration_ns"] or 0) / 1e9, 0.001), 3)
    with slider:
        window = interval("Time window (s)", 0.0, end, "window", help="Narrows the plot and the table of requests.")
    whole = window == (0.0, end)
    figure = _timeline_figure(str(recording.path), stamp(recording.path), None if whole else window)
    st.plotly_chart(figure, key="timeline", config=_BAR)
    return None if whole else window


def _lifecycles(recording: Recording, metrics: RunMetrics) -> None:
    s = metrics.scalars()
    steps, itl, queue = (metrics.distribution(name) for name in ("step_ms", "itl_ms", "queue_ms"))
    gaps = "itl_ms" if itl.count else "tpot_ms"
    spread = metrics.distribution(gaps)
    cards: dict[str, list[tuple[str, Any, str]]] = {
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
            ("busy (%)", _percent(s["busy"]), "busy"),
        ],
        "Memory": [
            ("KV mean (%)", _percent(s["kv_usage"]), "kv_usage"),
            ("KV peak (%)", _percent(s["kv_usage_peak"]), "kv_usage"),
            ("prefix hits (%)", _percent(s["prefix_hit_rate"]), "prefix_hit_rate"),
            ("preemptions", s["preemptions"], "preemptions"),
        ],
        "Request": [
            ("queue p50 (ms)", queue.p50, "queue_ms"),
            ("queue p99 (ms)", queue.p99, "queue_ms"),
            ("requests/s", s["request_throughput"], "request_throughput"),
            ("peak at once", s["concurrency_peak"], "concurrency"),
        ],
    }
    st.subheader(
        "Four lifecycles",
        anchor=False,
        help="The same run as its tokens, its steps, its memory and its requests saw it.",
    )
    figures = _lifecycle_figures(str(recording.path), stamp(recording.path))
    for place, (title, cells) in zip(st.columns(4, gap="small"), cards.items(), strict=True):
        with place.container(border=True):
            _card(title, cells)
            st.plotly_chart(figures[title], key=title, config=_BARE)


@st.cache_resource(max_entries=16, show_spinner=False)
def _lifecycle_figures(directory: str, stamp: int) -> dict[str, go.Figure]:
    recording, metrics = open_run(Path(directory))
    colour = _colour(recording)
    of = metrics.values
    gaps = "itl_ms" if metrics.distribution("itl_ms").count else "tpot_ms"
    prefill = np.nan_to_num(column(recording.table("steps", ["prefill_tokens"]), "prefill_tokens"))
    return {
        "Token": run_charts.histogram(of(gaps), gaps, colour),
        "Compute": run_charts.step_times(of("batch_tokens"), of("step_ms"), prefill, colour),
        "Memory": run_charts.memory_shares(of("kv_usage"), of("kv_pressure"), of("step_ms"), colour),
        "Request": run_charts.phases(of("queue_ms"), of("prefill_ms"), of("decode_ms"), colour),
    }


@st.cache_resource(max_entries=16, show_spinner=False)
def _timeline_figure(directory: str, stamp: int, window: tuple[float, float] | None) -> go.Figure:
    recording, _ = open_run(Path(directory))
    blocks = float(recording.run["num_blocks"] or 0) * (recording.run["replicas"] or 1)
    steps = recording.table("steps", _STEP_COLUMNS)
    return run_charts.timeline(steps, blocks or float("nan"), _colour(recording), window)


def _colour(recording: Recording) -> str:
    return CLOCK.get(recording.run["clock"], NEUTRAL)


def _card(title: str, cells: list[tuple[str, Any, str]]) -> None:
    st.markdown(f"**{title}**")
    for begin in (0, 2):
        for cell, (text, value, name) in zip(st.columns(2), cells[begin : begin + 2], strict=True):
            cell.metric(text, _number(value), help=metric(name).help)


def _requests(recording: Recording, metrics: RunMetrics, window: tuple[float, float] | None) -> None:
    heading, order = st.columns([3, 1], vertical_alignment="bottom")
    with order:
        by = choose("Slowest by", _SHOWN, "by", show=lambda name: metric(name).axis)
    table = recording.table("requests", _REQUEST_COLUMNS)
    arrival, finish = column(table, "arrival_ns") / 1e9, column(table, "finish_ns") / 1e9
    inside = np.ones(table.num_rows, dtype=bool)
    if window is not None:
        inside = (arrival <= window[1]) & ~(finish < window[0])
    values = np.where(np.isnan(metrics.values(by)), -1.0, metrics.values(by))
    rows = np.flatnonzero(inside)
    rows = rows[np.argsort(-values[rows], kind="stable")][:ROWS]
    with heading:
        st.subheader("Requests", anchor=False, help="Select a row to see where its time went.")
        shown = f"the {len(rows):,} slowest of {int(inside.sum()):,}" if inside.sum() > ROWS else f"{len(rows):,}"
        st.caption(
            f"Showing {shown}{'' if window is None else ' in the time window'}. Select one to see where its time went."
        )
    if not len(rows):
        st.info("No request was there in this time window.", icon=":material/filter_alt_off:")
        return
    chosen = table.take(pa.array(rows))
    columns: dict[str, Any] = {
        "request": chosen["request_id"].to_numpy(),
        "status": chosen["status"].to_pylist(),
        "arrival (s)": arrival[rows],
        "prompt": chosen["prompt_tokens"].to_numpy(),
        "output": chosen["output_tokens"].to_numpy(),
        **{_heading(name): metrics.values(name)[rows] for name in _SHOWN},
        "preemptions": chosen["preemptions"].to_numpy(),
    }
    formats = {"arrival (s)": "%.2f", **{_heading(name): "%.1f" for name in _SHOWN}}
    helps = {_heading(name): metric(name).help for name in _SHOWN}
    event = st.dataframe(
        columns,
        hide_index=True,
        height=270,
        on_select="rerun",
        selection_mode="single-row",
        key=f"requests-{recording.path}-{by}",
        column_config={
            name: st.column_config.NumberColumn(format=form, help=helps.get(name)) for name, form in formats.items()
        },
    )
    at = event.selection.rows[0] if event.selection.rows and event.selection.rows[0] < len(rows) else None
    at = _linked(columns["request"]) if at is None else at
    st.query_params["request"] = str(columns["request"][at])
    _waterfall(recording, metrics, int(rows[at]))


def _heading(name: str) -> str:
    return metric(name).axis.replace(" time", "")


def _linked(ids: np.ndarray[Any, Any]) -> int:
    """The row of the request that the URL names, or the first."""
    found = np.flatnonzero(ids.astype(str) == st.query_params.get("request", ""))
    return int(found[0]) if len(found) else 0


def _waterfall(recording: Recording, metrics: RunMetrics, row: int) -> None:
    request: dict[str, Any] = recording.table("requests", _WATERFALL_COLUMNS).slice(row, 1).to_pylist()[0]
    intervals: list[tuple[int, int]] = []
    preempted = request["preempted_ns"] or 0
    if request["preemptions"]:
        steps = recording.table("steps", ["replica", "plan_ns", "start_ns", "row_ids", "preempted_ids"])
        if steps.num_rows <= 200_000:
            intervals = run_charts.preempted_intervals(steps, request["request_id"], request["replica"])
    st.markdown(f"**Request {request['request_id']}**")
    facts = [
        request["status"] + (f" ({request['reason']})" if request["reason"] else ""),
        f"{request['prompt_tokens'] or 0:,} prompt tokens, {request['prefix_hit_tokens'] or 0:,} of them cached",
        f"{request['output_tokens'] or 0:,} output tokens",
        *(
            f"{metric(name).label} {_number(metrics.values(name)[row])} ms"
            for name in ("ttft_ms", "tpot_ms", "e2e_ms")
            if np.isfinite(metrics.values(name)[row])
        ),
    ]
    if request["preemptions"]:
        where = "" if intervals else " (the recording does not tell when)"
        times = "once" if request["preemptions"] == 1 else f"{request['preemptions']} times"
        facts.append(f"preempted {times}, for {_number(preempted / 1e6)} ms{where}")
    st.caption(" · ".join(facts))
    st.plotly_chart(run_charts.waterfall(request, _colour(recording), intervals), key="waterfall", config=_BARE)


def _provenance(run: Mapping[str, Any]) -> None:
    with st.expander("How this was run"):
        for title in ("deployment", "hardware", "notes"):
            if run[title]:
                st.markdown(f"**{title.capitalize()}**")
                try:
                    st.json(json.loads(run[title]), expanded=2)
                except ValueError:
                    st.text(run[title])
        st.caption(
            " · ".join(
                f"{name} {run[name]}"
                for name in ("run_id", "version", "seed", "calibration")
                if run[name] not in (None, "")
            )
        )


def _number(value: Any) -> str:
    if value is None or (isinstance(value, float) and not np.isfinite(value)):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


_BARE = {"displayModeBar": False}
_STEP_COLUMNS = [
    "replica",
    "start_ns",
    "end_ns",
    "waiting",
    "running",
    "used_blocks",
    "prefill_tokens",
    "decode_rows",
]
_REQUEST_COLUMNS = [
    "request_id",
    "status",
    "arrival_ns",
    "finish_ns",
    "prompt_tokens",
    "output_tokens",
    "preemptions",
]
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
