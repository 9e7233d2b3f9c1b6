"""What datasheets say of each candidate, before anything is simulated: fast enough to be there while one types.

A step takes at least as long as its FLOPs at the GPU's peak, and its bytes at the memory's bandwidth (the roofline:
Williams, Waterman and Patterson, CACM 2009). Here every engine is always as full as its KV memory allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa
import streamlit as st

from dashboard.blocks import table
from dashboard.plan_page.words import ROOM, ROOM_HELP
from dashboard.shown import verbatim
from planning.plan.candidates import Engine, RuledOut
from planning.plan.pricing import priced_candidates
from planning.plan.request import PlanRequest
from planning.traffic import mean_rate
from serving.deployments.gpu_spec import find_gpu, gpus
from serving.deployments.model_catalogue import find_model
from serving.workload import PRIVATE, Workload
from traces.step_work import StepWork

_USER, _RATE = "tok/s per user", "requests/s of a replica"
_FORMATS = {_USER: "%.0f", _RATE: "%.3g", "GPUs": "%d", "$/h": "$%.2f", **dict.fromkeys(ROOM, "localized")}


def estimates(request: PlanRequest, workload: Workload) -> tuple[list[dict[str, Any]], list[RuledOut]]:
    """A row for each candidate that fits, the cheapest first, and what does not."""
    found = priced_candidates(request, workload)
    rows = [_row(engine, workload) for engine in found.engines if engine.gpu in gpus()]
    return sorted(rows, key=lambda row: (row["$/h"], row["candidate"])), found.ruled_out


def estimates_table(rows: list[dict[str, Any]], ruled_out: list[RuledOut]) -> None:
    """What `estimates` found."""
    if rows:
        st.markdown("**At the roofline**, before anything is simulated:", help=_HELP)
        table(rows, _FORMATS, dict.fromkeys(ROOM, ROOM_HELP))
    for name, reason in ruled_out:
        st.caption(f"{verbatim(name)} does not fit: {verbatim(reason)}")


def _row(engine: Engine, workload: Workload) -> dict[str, Any]:
    requests = workload.requests
    prompt, output = (fmean(getattr(each, of) for each in requests) for of in ("prompt_len", "output_len"))
    computed = fmean(sum(tokens for key, tokens in each.prompt if key == PRIVATE) for each in requests)
    context = prompt + output / 2
    batch = max(min(engine.kv_tokens / context, engine.deployment.scheduler.max_num_seqs), 1.0)
    work = StepWork(find_model(engine.deployment.model), engine.deployment, find_gpu(engine.gpu))
    # A step with one row, one with all, and one with a prompt. A prompt shares its step, and so the reading of weights.
    compute, memory = _roofline_s(work, [(0, 1, context), (0, batch, batch * context), (computed, 0, 0)])
    request_s = max(output * compute[1] / batch + compute[2], output * memory[1] / batch)
    replicas = math.ceil(mean_rate(workload) * request_s / sum(engine.split or (1,)))
    return {
        "candidate": engine.name,
        _USER: 1 / max(compute[0], memory[0]),
        _RATE: sum(engine.split or (1,)) / request_s,
        "GPUs": replicas * engine.gpus,
        "$/h": replicas * engine.usd_per_hour,
        **dict(zip(ROOM, (engine.kv_tokens, round(engine.kv_tokens / (prompt + output))), strict=True)),
    }


def _roofline_s(work: StepWork, steps: Sequence[tuple[float, float, float]]) -> tuple[list[float], list[float]]:
    """Seconds of computing and of moving; a step is its prompt tokens, its decode rows, and the tokens before them."""
    prompts, rows, contexts = (np.array(column, dtype=float) for column in zip(*steps, strict=True))
    given = pa.table(
        {
            "prefill_tokens": prompts,
            "prefill_rows": np.minimum(prompts, 1.0),
            "prefill_pairs": prompts * (prompts + 1) / 2,
            "prefill_context": np.zeros(len(steps)),
            "decode_rows": rows,
            "decode_context": contexts,
            "draft_tokens": np.zeros(len(steps)),
            "sampled_rows": rows + np.minimum(prompts, 1.0),
        }
    )
    return (work.flops(given) / work.flop_per_s).tolist(), (work.moved_bytes(given) / work.bytes_per_s).tolist()


_HELP = (
    "What the datasheet of each GPU allows: FLOPs at its peak, bytes at its memory bandwidth, each engine as full as "
    "its memory allows. SLOs, bursts, communication and drafts are not in it. The answer nearly always takes more GPUs."
)
