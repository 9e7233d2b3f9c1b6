"""Random scenarios for vLLM's scheduler and ours: small workloads with configurations that give them little room.

A scenario is an oracle recording without `steps` and `results`. Settings that some releases of vLLM lack or treat
differently have families of their own.
"""

from __future__ import annotations

from random import Random
from typing import Any

COST = {"base_ns": 1000, "per_token_ns": 70, "per_pair_ps": 900}
FAMILIES = (
    "plain loop", "overlapped loop", "priorities", "drafts", "sliding windows", "long-prefill threshold", "watermark",
    "rarer settings",
)  # fmt: skip


def scenario(family: str, seed: int) -> dict[str, Any]:
    """Return the scenario of a family with this seed.

    The first two families use one loop; the others use the plain or the overlapped loop at random. All families but
    `priorities` are first come, first served.
    """
    chance = Random(f"{family} {seed}")
    overlapped = chance.random() < 0.5 if family != "plain loop" else False
    overlapped = overlapped or family == "overlapped loop"
    found = random_recording(chance, "priority" if family == "priorities" else "fcfs", overlapped, sharing=True)
    config = found["config"]
    config["max_num_batched_tokens"] = max(config["max_num_batched_tokens"], config["max_num_seqs"])
    config["long_prefill_token_threshold"] = chance.choice([1, 4, 9]) if family == "long-prefill threshold" else 0
    config["watermark"] = chance.choice([0.1, 0.5]) if family == "watermark" else 0.0
    if family == "drafts":
        tokens = chance.choice([1, 2, 4])
        config["speculative"] = {
            "method": chance.choice(["ngram", "draft_model", "eagle"]),
            "num_speculative_tokens": tokens,
            "acceptance_rate": chance.choice([0.0, 0.4, 0.9, 1.0]),
        }
        config["max_num_batched_tokens"] += (tokens + 1) * config["max_num_seqs"]
        config["num_blocks"] += 2 * tokens  # with fewer we reject requests that accepted drafts may bring to an end
    if family == "sliding windows":
        config |= with_windows(config, chance)
    if family == "rarer settings":
        config["long_prefill_token_threshold"] = chance.choice([0, 4, 9])
        config["vllm"] = rarer_settings(config, chance)
        for request in found["requests"]:
            request["skip_cache"] = chance.random() < 0.2
    return {"name": f"{family} {seed}", **found}


def random_recording(chance: Random, policy: str, overlapped: bool, sharing: bool) -> dict[str, Any]:
    """Return a random small workload, and a configuration with little room for it."""
    size = chance.choice([1, 2, 3, 4, 7, 8, 16, 32])
    gaps = chance.choice([[0], [0, 0, 1, 1500], [0, 0, 1, 1500, 8000, 40000], [1, 700, 2500]])
    most_own, most_output = chance.choice([8, 20, 40, 70]), chance.choice([1, 6, 24, 60])
    requests: list[dict[str, Any]] = []
    arrival = 0
    for id in range(chance.randint(1, chance.choice([4, 14, 24]))):
        arrival += chance.choice(gaps)
        prompt: list[list[Any]] = []
        kind = chance.choice(["alone", "system", "turn", "turn", "again"]) if sharing else "alone"
        if kind == "system":
            prompt = [[f"sys{chance.randint(0, 1)}", chance.choice([size, 2 * size, 2 * size + 1, 3 * size - 1])]]
        elif kind != "alone" and requests:
            before = chance.choice(requests[-4:])
            prompt = before["prompt"]
            if kind == "turn":  # may come before the answer is there, or contain only its beginning
                prompt = [*prompt, [f"out:{before['id']}", chance.randint(1, before["output_len"])]]
        own = chance.randint(0 if prompt else 1, most_own)
        if chance.random() < 0.3:
            own = size * chance.randint(1, max(1, most_own // size))
        if own:
            prompt = [*prompt, [f"u{id}", own]]
        request: dict[str, Any] = {"id": id, "arrival_ns": arrival, "prompt": prompt}
        request |= {"output_len": chance.randint(1, most_output), "priority": chance.randint(0, 2)}
        requests.append(request)
    if chance.random() < 0.4:  # stop tokens
        for request in requests:
            request["max_tokens"] = request["output_len"] + chance.choice([0, 0, 1, 2, 30])
    longest = max(sum(n for _, n in r["prompt"]) + r.get("max_tokens", r["output_len"]) for r in requests)
    max_model_len = longest + chance.choice([0, 0, 1, 20])
    chunked = chance.random() < 0.8
    need = -(-longest // size)
    config = {
        "max_num_seqs": chance.choice([1, 2, 4, 16, 16]),
        "max_num_batched_tokens": chance.choice([1, 2, 5, 9, 16, 40]) if chunked else max_model_len,
        "max_model_len": max_model_len,
        "block_size": size,
        "num_blocks": 1 + need + chance.choice([0, 1, need // 2, need, 3 * need]),
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": chance.random() < 0.8,
        "long_prefill_token_threshold": chance.choice([0, 0, 1, 4, 9]),
        "scheduler_reserve_full_isl": chance.random() < 0.4,
        "watermark": chance.choice([0.0, 0.0, 0.0, 0.1, 0.5]),
        "policy": policy,
        "async_scheduling": overlapped,
    }
    return {"config": config, "cost": COST, "requests": requests}


def with_windows(config: dict[str, Any], chance: Random) -> dict[str, Any]:
    """Return `config` for a model that has some or only layers with a sliding window."""
    size = config["block_size"]
    groups = [chance.randint(2, 3 * size + 2)] * chance.choice([1, 3]) + [0] * chance.randint(0, 2)
    return config | {
        "kv_groups": groups,
        "num_blocks": 1 + (config["num_blocks"] - 1) * len(groups),
        "prefix_cache_retention_interval": chance.choice([0, 0, size, 4 * size, None]),
    }


def rarer_settings(config: dict[str, Any], chance: Random) -> dict[str, Any]:
    """Return a random choice of the rarer settings of vLLM's scheduler."""
    settings = {
        "max_num_active_seqs": chance.randint(1, config["max_num_seqs"]),
        "prefill_schedule_interval": chance.choice([2, 3, 8]),
        "long_prefill_token_threshold_adaptive": True,
    }
    if config.get("enable_chunked_prefill", True):
        settings["max_num_scheduled_tokens"] = chance.randint(1, config["max_num_batched_tokens"])
    return {name: value for name, value in settings.items() if chance.random() < 0.5}
