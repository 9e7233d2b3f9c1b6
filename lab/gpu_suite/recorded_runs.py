"""Recordings for co-validation, and their archives.

Each scenario is recorded twice; the repeat gives the floor of prediction errors. A run leaves few archives, each small
enough to be copied away.
"""

from __future__ import annotations

import itertools
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from lab.gpu_suite.engine_benchmark import drain, offer, random_prompts
from lab.gpu_suite.scenarios import Pace, scenarios, usual_lengths
from realengine.engine import Engine
from realengine.replay import record

_REPEATS = 2
_ARCHIVE_BYTES = 15_000_000


def pace_of(engine: Engine, prompt: int, output: int) -> Pace:
    """Measure the pace on half the batch of requests with prompts of `prompt` tokens that decode `output` tokens each.

    Decode steps are timed from end to end at those contexts: with nearly no KV they would be faster than any step of
    the scenarios, and a load of 0.9 an overload.
    """
    rows = max(engine.deployment.scheduler.max_num_seqs // 2, 1)
    offer(engine, ((tokens, output) for tokens in random_prompts(engine, rows, prompt)))
    steps = drain(engine)
    engine.reset()
    decodes = [
        after.end_ns - before.end_ns
        for before, after in itertools.pairwise(steps)
        if after.plan.decode_rows == rows and not after.plan.prefill_rows
    ]
    prefills = [step for step in steps if step.plan.prefill_rows]
    if not decodes:
        raise RuntimeError(f"{rows} requests of {prompt + output} tokens were never all running; they need more blocks")
    prompt_ns = sum(step.end_ns - step.start_ns for step in prefills)
    return Pace(int(median(decodes)), max(prompt_ns // sum(step.plan.prefill_tokens for step in prefills), 1))


def record_runs(
    engine: Engine, out: Path, seconds: float, longest: int, left: Callable[[], float]
) -> Iterator[dict[str, Any]]:
    """Record every scenario into `out`, repeats one after the other, while `left()` seconds allow it.

    Each has `seconds` of arrivals, of requests of at most `longest` tokens. It yields a row for each run.
    """
    whole = engine.deployment.scheduler
    full = {"num_blocks": whole.num_blocks, "scheduler_reserve_full_isl": whole.scheduler_reserve_full_isl}
    try:
        pace = pace_of(engine, *usual_lengths(longest))
        for workload, limits in scenarios(whole, pace, seconds, longest):
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
        engine.limit(**full)  # later phases have this engine, too


def pack(recording: Path, out: Path) -> None:
    """Add the folder `recording` to the last of `out`'s archives, or to a new one if that would be too large.

    The archive is replaced in one rename, so earlier recordings are safe whatever happens.
    """
    archives = sorted(out.glob("recordings-*.tar"), key=lambda path: int(path.stem.rpartition("-")[2]))
    size = sum(file.stat().st_size for file in recording.iterdir())
    if not archives or archives[-1].stat().st_size + size > _ARCHIVE_BYTES:
        archives.append(out / f"recordings-{len(archives) + 1}.tar")
    temporary = archives[-1].with_suffix(".part")
    if archives[-1].exists():
        shutil.copyfile(archives[-1], temporary)
    with tarfile.open(temporary, "a") as archive:
        archive.add(recording, arcname=recording.name)
    temporary.replace(archives[-1])


def unpack(out: Path, into: Path) -> list[Path]:
    """Extract every recording in `out`'s archives, as folders in `into`, and return them by name."""
    into.mkdir(parents=True, exist_ok=True)
    for path in out.glob("recordings-*.tar"):
        with tarfile.open(path) as archive:
            archive.extractall(into, filter="data")
    return sorted(into.iterdir())
