"""Estimates of each candidate from datasheets, fast enough to appear while one types."""

from __future__ import annotations

import math
from typing import Any

import streamlit as st

from tokentwin.dashboard.blocks import data_table
from tokentwin.dashboard.shown import verbatim
from tokentwin.planning.plan.candidates import Engine, RuledOut
from tokentwin.planning.plan.document import ROOM_HELP
from tokentwin.planning.plan.first_answer import MeanRequest, Roofline
from tokentwin.planning.plan.pricing import priced_candidates
from tokentwin.planning.plan.request import PlanRequest
from tokentwin.planning.traffic import mean_rate
from tokentwin.serving.deployments.gpu_spec import GpuSpec
from tokentwin.serving.scheduler import POLICIES
from tokentwin.serving.workload import Workload

_ROOM = ("KV room (tokens)", "KV room (requests)")  # of one engine
_USER, _RATE = "tok/s per user", "requests/s per replica"
_FORMATS = {_USER: "%.0f", _RATE: "%.3g", "GPUs": "%d", "$/h": "$%.2f", **dict.fromkeys(_ROOM, "localized")}


def estimates(request: PlanRequest, workload: Workload) -> tuple[list[dict[str, Any]], list[RuledOut]]:
    """Return a row for each candidate that fits, the cheapest first, and the candidates that do not fit.

    Policies of users are left out: they are code, which only jobs run.
    """
    bundled = tuple(policy for policy in request.policies or () if policy in POLICIES)
    if bundled != (request.policies or ()):
        request = request.model_copy(update={"policies": bundled or ("vllm",)})
    candidates = priced_candidates(request, workload)
    mean, rate = MeanRequest.from_requests(list(workload.requests)), mean_rate(workload)
    rate = rate if math.isfinite(rate) else 0.0  # a closed loop, which one replica serves at some rate
    rows = [_row(engine, gpu, mean, rate) for engine in candidates.engines if (gpu := engine.gpu_spec) is not None]
    return sorted(rows, key=lambda row: (row["$/h"], row["candidate"])), candidates.ruled_out


def estimates_table(rows: list[dict[str, Any]], ruled_out: list[RuledOut]) -> None:
    """Draw the estimates as a table."""
    if rows:
        st.markdown(
            "**Estimates at the roofline**, before any simulation; nearly every fleet needs more GPUs:", help=_HELP
        )
        data_table(rows, _FORMATS, dict.fromkeys(_ROOM, ROOM_HELP))
    for name, reason in ruled_out:
        st.caption(f"{verbatim(name)} does not fit: {verbatim(reason)}")


def _row(engine: Engine, gpu: GpuSpec, mean: MeanRequest, rate: float) -> dict[str, Any]:
    token_s, request_s = Roofline.from_engine(engine, gpu, mean)
    replicas = max(math.ceil(rate * request_s), 1)
    return {
        "candidate": engine.name,
        _USER: 1 / token_s,
        _RATE: 1 / request_s,
        "GPUs": replicas * engine.gpus,
        "$/h": replicas * engine.usd_per_hour,
        **dict(zip(_ROOM, (engine.kv_tokens, round(engine.kv_tokens / (mean.prompt + mean.output))), strict=True)),
    }


_HELP = (
    "These estimates follow from the datasheet of each GPU: FLOPs at the peak rate, bytes at the memory bandwidth, and "
    "as many requests as fit into memory. They ignore SLOs, bursts, communication and speculative decoding. The answer "
    "nearly always needs more GPUs. With a number of requests in flight, they are those of one replica."
)
