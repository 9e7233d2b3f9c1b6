"""Recordings for co-validation: each scenario twice, the repeat giving the floor of what can be predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from realengine.engine import Engine
from realengine.gpu_suite.scenarios import Pace, scenarios
from realengine.replay import record

_REPEATS = 2


def pace_of(engine: Engine) -> Pace:
    """Rough times, from dummy steps of half the batch and of one long prompt."""
    config = engine.deployment.scheduler
    rows = max(config.max_num_seqs // 2, 1)
    size = min(config.max_num_batched_tokens, config.max_model_len)
    decode = min(engine.run_dummy([1] * rows) for _ in range(5))
    prefill = min(engine.run_dummy([size]) for _ in range(3))
    return Pace(decode, max(prefill // size, 1))


def record_runs(
    engine: Engine, out: Path, seconds: float, longest: int, left: Callable[[], float]
) -> Iterator[dict[str, Any]]:
    """Record every scenario into `out`, repeats one after the other, while `left()` seconds allow it.

    Each has `seconds` of arrivals, of requests of at most `longest` tokens. Yields what each run was.
    """
    whole = engine.deployment.scheduler
    full = {"num_blocks": whole.num_blocks, "scheduler_reserve_full_isl": whole.scheduler_reserve_full_isl}
    try:
        for workload, limits in scenarios(whole, pace_of(engine), seconds, longest):
            for repeat in range(1, _REPEATS + 1):
                if left() < 1.5 * seconds:
                    return
                engine.limit(**{**full, **limits})
                done = record(workload, engine, out / f"{workload.name}-{repeat}", overwrite=True)
                yield {
                    "run": f"{workload.name}-{repeat}",
                    "status": done.status,
                    "requests": done.requests,
                    "finished": done.finished,
                    "duration_s": done.duration_ns / 1e9,
                    "canary_before_ns": done.canary_before_ns,
                    "canary_after_ns": done.canary_after_ns,
                }
    finally:
        engine.limit(**full)  # what comes next has this engine too
