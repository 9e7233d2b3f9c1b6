"""The runs on which engine and simulator are compared: their workloads, recordings, and archives of these.

The scenarios stress queueing, memory, shared prefixes or prompts. Arrival rates, and the number of KV blocks of the
scenario with tight KV, follow from the engine's speed, which is measured first. So a scenario is equally near to
saturation on any machine. Each scenario is recorded twice: the difference of the two is the floor of prediction errors.
The recordings are packed into a few archives, small enough to copy.
"""

from __future__ import annotations

import itertools
import shutil
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from lab.gpu_suite.engine_benchmark import drain, offer, random_prompts
from lab.gpu_suite.units import OutOfTime
from tokentwin.realengine.engine import Engine
from tokentwin.realengine.replay import record
from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.kv.blocks import blocks_for
from tokentwin.serving.workload import Workload
from tokentwin.traces.synth import parse_spec, synthesise

_TIGHT_SHARE = 0.6
_BURSTS = 3.0  # coefficient of variation of the gaps between arrivals where KV is tight


class Pace(NamedTuple):
    """The ns of a decode step with half of `max_num_seqs` and the usual contexts, and the ns of one prompt token."""

    decode_step_ns: int
    prompt_token_ns: int


class RunSizes(NamedTuple):
    """Seconds of arrivals of a run, and the most tokens of a request."""

    seconds: float
    longest: int


class Scenario(NamedTuple):
    """A workload, and the scheduler's settings that belong to it."""

    workload: Workload
    limits: dict[str, int | bool]


def usual_lengths(longest: int) -> tuple[int, int]:
    """Return the mean numbers of prompt and output tokens of most scenarios."""
    return longest // 8, longest // 24


def scenarios(config: SchedulerConfig, pace: Pace, seconds: float, longest: int) -> list[Scenario]:
    """Return five scenarios of about `seconds` of arrivals each, with requests of at most `longest` tokens.

    In the scenario with tight KV, the blocks have room for a fraction, `_TIGHT_SHARE`, of the tokens that requests
    would hold (Little's law: rate x time in decode). Its requests come in bursts. So some requests are preempted
    whatever the engine's speed.
    """
    usual = usual_lengths(longest)
    rows = max(config.max_num_seqs // 2, 1)
    at_once = 0.7 * usual[1] * pace.decode_step_ns / _request_ns(pace, rows, *usual)
    kept_tokens = _TIGHT_SHARE * at_once * (usual[0] + usual[1] / 2)
    tight_blocks = max(blocks_for(longest, config.block_size), int(kept_tokens) // config.block_size) + 1
    tight: dict[str, int | bool] = {
        "num_blocks": min(tight_blocks, config.num_blocks),
        "scheduler_reserve_full_isl": False,
    }
    shared: dict[str, Any] = {"system_prompts": {"count": 4, "tokens": longest // 8, "choice": "zipf"}}
    plans: list[tuple[str, float, tuple[int, int], dict[str, Any], dict[str, int | bool]]] = [
        ("roomy", 0.5, usual, {}, {}),
        ("kv-tight", 0.7, usual, {}, tight),
        ("shared-prefix", 0.6, usual, shared, {}),
        ("long-prompts", 0.6, (longest // 2, longest // 64), {}, {}),
        ("near-saturation", 0.9, usual, {}, {}),
    ]
    made = []
    for number, (name, load, (prompt, output), more, limits) in enumerate(plans):
        rate = load * 1e9 / _request_ns(pace, rows, prompt, output)
        bursts = {"kind": "gamma", "cv": _BURSTS} if limits else {"kind": "poisson"}
        most_output = max(min(4 * output, longest // 3), 1)
        spec = {
            "name": name,
            "seed": 100 + number,
            "duration_s": seconds,
            "arrivals": {**bursts, "rate": rate},
            "prompt": {
                "kind": "lognormal",
                "mean": max(prompt, 4),
                "sigma": 0.6,
                "max": longest - most_output - longest // 8 - 1,
            },
            "output": {"kind": "lognormal", "mean": max(output, 2), "sigma": 0.6, "max": most_output},
            **more,
        }
        made.append(Scenario(synthesise(parse_spec(spec, where=name)), limits))
    return made


def _request_ns(pace: Pace, rows: int, prompt: int, output: int) -> float:
    """Return the ns of device time per request when `rows` requests decode together."""
    return prompt * pace.prompt_token_ns + output * pace.decode_step_ns / rows


_REPEATS = 2
SCENARIOS = 5
_ARCHIVE_BYTES = 15_000_000


def pace_of(engine: Engine, prompt: int, output: int) -> Pace:
    """Measure the pace on half of `max_num_seqs` requests, with `prompt` prompt tokens and `output` output tokens each.

    Decode steps are timed from end to end, at the contexts of these requests. With nearly no KV they would be faster
    than any step of the scenarios, and a load of 0.9 would be an overload.
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


def recordings(
    engine: Callable[[], Engine], out: Path, sizes: RunSizes, known: Pace | None, left: Callable[[], float]
) -> list[Callable[[], Iterator[dict[str, Any]]]]:
    """Return the recordings of every scenario into `out`, one repeat after the other.

    Each yields rows: one with the pace that it has measured, unless the pace is `known`, and one with the run. It
    raises OutOfTime if `left()` is too short for the run.
    """
    paces = [] if known is None else [known]

    def one(number: int, repeat: int) -> Iterator[dict[str, Any]]:
        if left() < 1.5 * sizes.seconds:
            raise OutOfTime
        if not paces:
            paces.append(pace_of(engine(), *usual_lengths(sizes.longest)))
            yield {"pace": paces[0]._asdict()}
        yield record_scenario(engine(), out, sizes, paces[0], number, repeat)

    return [partial(one, number, repeat) for number in range(SCENARIOS) for repeat in range(1, _REPEATS + 1)]


def record_scenario(engine: Engine, out: Path, sizes: RunSizes, pace: Pace, number: int, repeat: int) -> dict[str, Any]:
    """Record scenario `number` into `out`, and return the row of the run; the engine keeps its own limits."""
    whole = engine.deployment.scheduler
    full = {"num_blocks": whole.num_blocks, "scheduler_reserve_full_isl": whole.scheduler_reserve_full_isl}
    workload, limits = scenarios(whole, pace, *sizes)[number]
    try:
        engine.limit(**{**full, **limits})
        done = record(workload, engine, out / f"{workload.name}-{repeat}", overwrite=True)
    finally:
        engine.limit(**full)
    return {
        "run": f"{workload.name}-{repeat}",
        "status": done.status,
        "requests": done.requests,
        "finished": done.finished,
        "duration_s": done.duration_ns / 1e9,
        "canary_before_ns": done.canary_before_ns,
        "canary_after_ns": done.canary_after_ns,
    }


def pack(recording: Path, out: Path) -> None:
    """Add the folder `recording` to the last of `out`'s archives, or to a new one if that would be too large.

    The new archive replaces the old one in one rename, so a crash cannot damage earlier recordings.
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
