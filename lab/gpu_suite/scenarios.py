"""The workloads on which engine and simulator are compared: queueing, memory, sharing or prompts dominate them.

Rates follow from the speed of the engine, measured a moment before, so that the same scenario is near saturation on any
machine. So do the blocks of the scenario that is short of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from serving.deployments.config import SchedulerConfig
from serving.kv.blocks import blocks_for
from serving.workload import Workload
from traces.synth import parse_spec, synthesise

_TIGHT_SHARE = 0.6
_BURSTS = 3.0  # coefficient of variation of the gaps where KV is tight


class Pace(NamedTuple):
    """The time in ns of a decode step at half the batch and the usual contexts, and of one prompt token."""

    decode_step_ns: int
    prompt_token_ns: int


class Scenario(NamedTuple):
    """A workload, and the scheduler's settings that belong to it."""

    workload: Workload
    limits: dict[str, int | bool]


def usual_lengths(longest: int) -> tuple[int, int]:
    """Return mean prompt and output tokens of most scenarios."""
    return longest // 8, longest // 24


def scenarios(config: SchedulerConfig, pace: Pace, seconds: float, longest: int) -> list[Scenario]:
    """Return five scenarios of about `seconds` of arrivals each, of requests of at most `longest` tokens.

    The tight KV has room for `_TIGHT_SHARE` of the tokens that would be in it (Little's law: rate x time in decode),
    and its requests come in bursts, so that some are preempted at any pace.
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
    """Return the device time of one request among `rows` that decode together."""
    return prompt * pace.prompt_token_ns + output * pace.decode_step_ns / rows
