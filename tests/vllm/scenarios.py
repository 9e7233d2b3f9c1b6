"""Random scenarios for `live_run`, each named by what it tests."""

from __future__ import annotations

from random import Random
from typing import Any

Scenario = dict[str, Any]


def requests(chance: Random, count: int, **more: Any) -> list[dict[str, Any]]:
    """Return one round: requests of three families of prompts with shared beginnings, a few steps apart."""
    families = [[chance.randrange(3, 500) for _ in range(150)] for _ in range(3)]
    found, at = [], 0
    for _ in range(count):
        shared = chance.choice(families)[: chance.choice([0, 31, 64, 100, 150])]
        own = [chance.randrange(3, 500) for _ in range(chance.randint(1, 120))]
        at += chance.choice([0, 0, 1, 3])
        asked = {"prompt": shared + own, "max_tokens": chance.randint(1, 60), "at_step": at}
        asked |= {name: value(chance) for name, value in more.items()}
        found.append({name: value for name, value in asked.items() if value is not None})
    return found


def turns(chance: Random, of: range, **more: Any) -> list[dict[str, Any]]:
    """Return the next round, in which each request continues the whole sequence of an earlier one."""
    found = []
    for at, number in enumerate(of):
        asked = {"prompt": [number, [chance.randrange(3, 500) for _ in range(chance.randint(1, 50))]]}
        asked |= {"max_tokens": chance.randint(1, 50), "at_step": at // 2}
        found.append(asked | {name: value(chance) for name, value in more.items()})
    return found


def _rounds(chance: Random, count: int = 24, rounds: int = 2, **more: Any) -> list[list[dict[str, Any]]]:
    return [requests(chance, count, **more), *(turns(chance, range(count), **more) for _ in range(rounds))]


def _abort(chance: Random) -> int | None:
    return chance.randint(0, 40) if chance.random() < 0.4 else None


TIGHT = {"num_gpu_blocks_override": 40}
WINDOWS = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 70,
}  # fmt: skip


def scenarios(seed: int = 0) -> dict[str, Scenario]:
    """Return all scenarios, by name."""

    def chance() -> Random:
        return Random(seed)

    found: dict[str, Scenario] = {
        "turns": {"requests": _rounds(chance())},
        "tight": {"requests": _rounds(chance()), "settings": TIGHT},
        "priority": {
            "requests": _rounds(chance(), priority=lambda chance: chance.randint(0, 2)),
            "settings": {**TIGHT, "scheduling_policy": "priority"},
        },
        "aborts": {
            "requests": [requests(chance(), 40, abort_after=_abort)],
            "settings": {"num_gpu_blocks_override": 60},
        },
        "stops": {
            "requests": _rounds(chance(), rounds=1, stop=lambda chance: list(range(3, 30))),
            "settings": TIGHT,
        },
        "chunks": {
            "requests": _rounds(chance(), rounds=1),
            "settings": {"max_num_batched_tokens": 64, "long_prefill_token_threshold": 24, "max_num_seqs": 8},
        },
        "whole prompts": {
            "requests": _rounds(chance(), rounds=1),
            "settings": {"enable_chunked_prefill": False, "max_num_batched_tokens": 1024, **TIGHT},
        },
        "no caching": {
            "requests": _rounds(chance(), rounds=1),
            "settings": {"enable_prefix_caching": False, **TIGHT},
        },
        "windows": {"requests": _rounds(chance(), rounds=1), "model": WINDOWS, "settings": TIGHT},
    }
    both = {
        f"{name}, {loop}": {**one, "settings": {**one.get("settings", {}), "async_scheduling": loop == "overlapped"}}
        for name, one in found.items()
        for loop in ("plain", "overlapped")
    }
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    both["drafts, plain"] = {
        "requests": _rounds(chance(), rounds=1),
        "settings": {"speculative_config": drafts, "async_scheduling": False, **TIGHT},
        "model": {"vocab_size": 512},
    }
    return both
