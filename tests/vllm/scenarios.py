"""Random scenarios for `live_run`, each named by what it tests."""

from __future__ import annotations

from random import Random
from typing import Any

from tests.vllm.tiny_audio import AUDIO, SOUND_TOKEN
from tests.vllm.tiny_model import BERT
from tests.vllm.tiny_pictures import PICTURE, PICTURES

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


def _chosen(chance: Random) -> int | None:
    return min(int(chance.expovariate(0.7)), 5) if chance.random() < 0.85 else None


def _embeddings(chance: Random) -> list[list[dict[str, Any]]]:
    """Return one round of requests without outputs, so many at once that they wait."""
    asked = requests(chance, 200)
    return [[{"prompt": one["prompt"], "at_step": one["at_step"] // 12} for one in asked]]


def _with_items(chance: Random, kind: str, placeholder: list[int], count: int = 20) -> list[list[dict[str, Any]]]:
    """Return two rounds with up to two of eight items in each prompt; half of the second goes on from the first."""
    first, second = requests(chance, count), requests(chance, count)
    for asked in first + second:
        asked[kind] = [chance.randrange(8) for _ in range(chance.choice([0, 1, 1, 2]))]
        for _ in asked[kind]:
            at = chance.randint(0, len(asked["prompt"]))
            while at and asked["prompt"][at - 1] in placeholder[:-1]:  # not within another one
                at -= 1
            asked["prompt"][at:at] = placeholder
    for before, asked in zip(first[::2], second[::2], strict=True):
        asked |= {"prompt": before["prompt"] + asked["prompt"], kind: before[kind] + asked[kind]}
    return [first, second]


TIGHT = {"num_gpu_blocks_override": 40}
POOLING = {"runner": "pooling", "skip_tokenizer_init": False}
SOUNDS = {
    "num_gpu_blocks_override": 160, "max_model_len": 3072, "max_num_batched_tokens": 512,
    "skip_tokenizer_init": False, "limit_mm_per_prompt": {"audio": 8},
}  # fmt: skip
LOOKS = {**SOUNDS, "max_num_batched_tokens": 256, "limit_mm_per_prompt": {"image": 8, "video": 0}}
OF_SOUNDS, OF_PICTURES = ("sounds", [SOUND_TOKEN]), ("pictures", PICTURE)
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
        "adapters": {
            "requests": _rounds(chance(), adapter=_chosen),
            "settings": {**TIGHT, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_cpu_loras": 3},
            "adapters": 6,
        },
        "sounds": {"requests": _with_items(chance(), *OF_SOUNDS), "model": AUDIO, "settings": SOUNDS},
        "whole sounds": {
            "requests": _with_items(chance(), *OF_SOUNDS),
            "model": AUDIO,
            "settings": {**SOUNDS, "disable_chunked_mm_input": True, "max_num_batched_tokens": 768},
        },
        "pictures": {"requests": _with_items(chance(), *OF_PICTURES), "model": PICTURES, "settings": LOOKS},
        "whole pictures": {
            "requests": _with_items(chance(), *OF_PICTURES),
            "model": PICTURES,
            "settings": {**LOOKS, "disable_chunked_mm_input": True, "max_num_batched_tokens": 300},
        },
        "windows": {"requests": _rounds(chance(), rounds=1), "model": WINDOWS, "settings": TIGHT},
    }
    both = {
        f"{name}, {loop}": {**one, "settings": {**one.get("settings", {}), "async_scheduling": loop == "overlapped"}}
        for name, one in found.items()
        for loop in ("plain", "overlapped")
    }
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    both["embeddings of a decoder, plain"] = {
        "requests": _embeddings(chance()),
        "settings": {**TIGHT, **POOLING, "max_num_batched_tokens": 128},
    }
    both["embeddings of an encoder, plain"] = {
        "requests": _embeddings(chance()),
        "model": BERT,
        "settings": {**POOLING, "max_num_batched_tokens": 512, "max_model_len": 512, "max_num_seqs": 4},
    }
    both["drafts, plain"] = {
        "requests": _rounds(chance(), rounds=1),
        "settings": {"speculative_config": drafts, "async_scheduling": False, **TIGHT},
        "model": {"vocab_size": 512},
    }
    return both
