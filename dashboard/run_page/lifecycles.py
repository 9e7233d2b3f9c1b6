"""Four lifecycles: the same run seen from its tokens, its steps, its memory and its requests."""

from __future__ import annotations

from typing import Any, NamedTuple

import plotly.graph_objects as go
import streamlit as st

from tokentwin.calibration.validation.evidence import trust_in_recording
from tokentwin.dashboard.blocks import facts, figure
from tokentwin.dashboard.loading import BY_FILES, open_run, token_gaps
from tokentwin.dashboard.palette import run_colour
from tokentwin.dashboard.run_page import charts as run_charts
from tokentwin.dashboard.sheet import Fact
from tokentwin.dashboard.shown import sentence
from tokentwin.dashboard.slos import Bounds
from tokentwin.planning.adapters_and_encoders import adapter_use, adapters_said, recorded_encoding
from tokentwin.serving.answers.figures import shown_number, shown_share, shown_times
from tokentwin.serving.metrics import metric
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.recording import Recording
from tokentwin.traces.tables import Distribution

_CELL_PX = 110  # width: four fit side by side on a wide page, two on a narrow one
_HELP = "Four views of the same run: its tokens, its steps (compute), its memory and its requests."

Cell = tuple[str, Any, str]


class _Spread(NamedTuple):
    """The gaps between tokens: ITL if token times were kept, otherwise TPOT; with a note if they come from a sample."""

    metric: str
    spread: Distribution
    note: str = ""


def lifecycles(recording: Recording, metrics: RunMetrics, bounds: Bounds) -> None:
    """Draw a card for each lifecycle, two side by side."""
    st.header("Four lifecycles", anchor=False, help=_HELP)
    trust = trust_in_recording(recording)
    gaps, figures = lifecycle_figures(recording, bounds)
    cards, notes = list(_cells(metrics, gaps).items()), _notes(recording, metrics, gaps)
    for pair in (cards[:2], cards[2:]):
        for place, (title, cells) in zip(st.columns(2, gap="small"), pair, strict=True):
            with place.container(border=True, height="stretch"):
                above = st.container()
                facts(map(_fact, cells), _CELL_PX)
                for note in notes.get(title, ()):
                    st.caption(note)
                figure(figures[title], title, title, trust, place=above, small=True)


def _cells(metrics: RunMetrics, gaps: _Spread) -> dict[str, list[Cell]]:
    s = metrics.scalars()
    steps, queue = (metrics.distribution(name) for name in ("step_ms", "queue_ms"))
    return {
        "Token": [
            (f"{metric(gaps.metric).label} p50", gaps.spread.p50, gaps.metric),
            (f"{metric(gaps.metric).label} p99", gaps.spread.p99, gaps.metric),
            ("input (tok/s)", s["input_throughput"], "input_throughput"),
            ("output (tok/s)", s["output_throughput"], "output_throughput"),
        ],
        "Compute": [
            ("step p50", steps.p50, "step_ms"),
            ("step p99", steps.p99, "step_ms"),
            ("tokens/step", metrics.step_mean("batch_tokens", weigh=False), "batch_tokens"),
            ("busy (%)", s["busy"], "busy"),
            *((f"{metric(name).label} (%)", s[name], name) for name in ("mfu", "mbu") if s[name] is not None),
        ],
        "Memory": [
            ("KV mean (%)", s["kv_usage"], "kv_usage"),
            ("KV peak (%)", s["kv_usage_peak"], "kv_usage"),
            ("prefix hits (%)", s["prefix_hit_rate"], "prefix_hit_rate"),
            ("preemptions", s["preemptions"], "preemptions"),
        ],
        "Request": [
            ("queue p50", queue.p50, "queue_ms"),
            ("queue p99", queue.p99, "queue_ms"),
            ("requests/s", s["request_throughput"], "request_throughput"),
            ("peak concurrency", s["concurrency_peak"], "concurrency"),
        ],
    }


def _fact(cell: Cell) -> Fact:
    text, value, name = cell
    if name.endswith("_ms"):
        (said,), unit = shown_times(value)
        text = f"{text} ({unit})"
    else:
        said = metric(name).shown(value)
    return Fact(text, said, None, metric(name).help)


def _notes(recording: Recording, metrics: RunMetrics, gaps: _Spread) -> dict[str, list[str]]:
    """Return sentences by card about what only some runs have, such as drafts, KV tiers, adapters and encoders."""
    s, run = metrics.scalars(), recording.run
    token, memory = [f"The ITL is {gaps.note}."] if gaps.note else [], []
    if s["acceptance_length"] is not None:
        token.append(
            f"A step with draft tokens gives a request {shown_number(s['acceptance_length'])} tokens on average. "
            f"{shown_share(s['draft_acceptance_rate'])} of the draft tokens are accepted. The ITL between tokens of "
            "the "
            "same step is 0."
        )
    if (run["replicas"] or 1) > 1:
        memory.append(
            "Each value is that of one replica at one of its steps. The plot over time shows the sum of all replicas."
        )
    if s["tier_hit_rate"] is not None:
        rates = [f"{shown_share(rate, 1)} from {tier}" for tier, rate in metrics.tier_hit_rates().items()]
        memory.append(f"Prompt tokens that came from KV tiers: {', '.join(rates) or 'none'}.")
    if (use := adapter_use(recording)) is not None:
        memory.append(sentence(adapters_said(use)))
    encoding = recorded_encoding(recording)
    return {"Token": token, "Memory": memory, "Compute": [sentence(encoding)] if encoding else []}


@st.cache_resource(max_entries=16, show_spinner=False, hash_funcs=BY_FILES)
def lifecycle_figures(recording: Recording, bounds: Bounds) -> tuple[_Spread, dict[str, go.Figure]]:
    """Return the gaps between tokens, and the figures of the cards."""
    _, metrics = open_run(recording.path)
    gaps = token_gaps(recording)
    if len(gaps.values):
        note = "" if gaps.share == 1 else f"that of a sample: {shown_share(gaps.share)} of the requests"
        spread, values = _Spread("itl_ms", Distribution.from_values(gaps.values), note), gaps.values
    else:
        spread, values = _Spread("tpot_ms", metrics.distribution("tpot_ms")), metrics.values("tpot_ms")
    prefill = recording.table("steps", ["prefill_tokens"])["prefill_tokens"].fill_null(0).to_numpy()
    return spread, run_charts.lifecycles(metrics, spread.metric, values, prefill, run_colour(recording.run), bounds)
