"""How long the real engine will take for a workload, and how much of it fits into the time there is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from planning.measure.calibration_runs import pace_of
from serving.workload import Workload, WorkloadRequest

if TYPE_CHECKING:
    from realengine.engine import Engine


def fitting(workload: Workload, engine: Engine, minutes: float | None, say: Callable[[str], None]) -> Workload:
    """The first requests of `workload` that the engine ends in so many `minutes`, or all; `say` is told how long.

    The engine is taken for a queue that works off one request after the other, each at its share of a decode step at
    half the batch.
    """
    decode_ns, prompt_ns = pace_of(engine)
    rows = min(max(engine.deployment.scheduler.max_num_seqs // 2, 1), workload.concurrency or 1 << 30)
    requests = list(workload.requests)
    kept: list[WorkloadRequest] = []
    ended_ns = 0
    for request in requests:
        work_ns = request.prompt_len * prompt_ns + request.output_len * decode_ns // rows
        until_ns = max(ended_ns, request.arrival_ns) + work_ns
        if minutes is not None and kept and until_ns > minutes * 60e9:
            break
        kept.append(request)
        ended_ns = until_ns
    cut = "" if len(kept) == len(requests) else f", the first {len(kept):,} of {len(requests):,} requests"
    say(f"{workload.name}: about {ended_ns / 1e9:,.0f} s{cut}")
    return replace(workload, requests=kept)
