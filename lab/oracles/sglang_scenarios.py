"""Random scenarios for SGLang's scheduler: small workloads with configurations that give them little room."""

from __future__ import annotations

from random import Random
from typing import Any

from lab.oracles.live_conformance import COST, random_recording

FAMILIES = (
    "plain loop",
    "overlapped loop",
    "longest prefix",
    "no radix cache",
    "tight",
    "mixed chunks",
    "long",
    "other orders",
    "preemption",
    "random order",
    "aborts",
    "many answers",
    "drafts",
)


def scenario(family: str, seed: int) -> dict[str, Any]:
    """Return the scenario of a family with this seed; all families but the first two use both loops."""
    chance = Random(f"sglang {family} {seed}")
    overlapped = family == "overlapped loop" or (family != "plain loop" and chance.random() < 0.5)
    recording = random_recording(chance, "fcfs", overlapped, sharing=True)
    given, requests = recording["config"], recording["requests"]
    size = chance.choice([1, 1, 1, 2, 4, 16, 64])
    if family == "long":
        requests = longer(requests, chance)
    if family in ("tight", "preemption", "aborts", "drafts"):
        for request in requests:
            request |= {"output_len": chance.randint(1, 150 if family == "tight" else 60)}
            request.pop("max_tokens", None)
    if family == "preemption":
        gap = chance.choice([400, 2000, 9000])
        for number, request in enumerate(requests):
            request |= {"priority": chance.randint(0, 9), "arrival_ns": number * gap}
    for request in requests:
        if "max_tokens" not in request and chance.random() < (0.9 if family in ("tight", "drafts") else 0.5):
            request["max_tokens"] = request["output_len"] + chance.choice([0, 0, 1, 5, 40])
    longest = max(sum(n for _, n in r["prompt"]) + r.get("max_tokens", r["output_len"]) for r in requests)
    whole = sum(tokens + size for request in requests for _, tokens in request["prompt"]) + longest + 20
    need = -(-longest // size) + 3
    room = [need // 8, need // 2, need] if family == "tight" else [need // 2, need, 3 * need, 8 * need]
    chunk = size * chance.choice([1, 2, 5]) + chance.choice([0, 1, 3, 16, 40])
    seats = chance.choice([4, 16] if family == "tight" else [1, 2, 4, 16, 16])
    chunked = family == "mixed chunks" or chance.random() < 0.8
    config = {
        "max_num_seqs": seats,
        "max_num_batched_tokens": -(-max(chunk, seats + size) // size) * size if chunked else whole,
        "max_model_len": longest + chance.choice([0, 0, 1, 20]),
        "block_size": size,
        "num_blocks": 1 + need + chance.choice(room),
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": family != "no radix cache",
        "async_scheduling": overlapped,
        "max_prefill_tokens": chance.choice([16384, 16384, 40, longest]),
        "schedule_policy": "lpm" if family == "longest prefix" else chance.choice(["fcfs", "fcfs", "lpm"]),
        "schedule_conservativeness": chance.choice([0.3, 0.1, 0.02] if family == "tight" else [1.0, 1.0, 0.3, 0.1]),
    }
    if family == "mixed chunks":
        config["enable_mixed_chunk"] = True
    if family == "no radix cache":
        config["schedule_policy"] = "fcfs"
    if family == "other orders":
        config["schedule_policy"] = chance.choice(["lof", "dfs-weight", "fcfs"])
        config["policy"] = "priority" if config["schedule_policy"] != "dfs-weight" and chance.random() < 0.5 else "fcfs"
        config["scheduler_recv_interval"] = chance.choice([1, 2, 5, 9])
    if family == "preemption":
        config |= {"policy": "priority", "schedule_policy": chance.choice(["fcfs", "fcfs", "lof"])}
        config["priority_scheduling_preemption_threshold"] = chance.choice([0, 0, 1, 3])
        config["max_num_seqs"] = chance.choice([1, 2, 3, 4])
        config["enable_mixed_chunk"] = chunked and chance.random() < 0.3
        if chance.random() < 0.5:
            config["scheduler_recv_interval"] = chance.choice([1, 9])
            hang_up(requests, chance)
    if family == "random order":
        config |= {"schedule_policy": "random", "schedule_seed": seed, "max_num_seqs": chance.choice([1, 2, 4])}
    if family == "aborts":
        config["scheduler_recv_interval"] = chance.choice([1, 1, 1, 3, 9])
        config["max_num_seqs"] = chance.choice([1, 2, 4, 16])
        config["enable_mixed_chunk"] = chunked and chance.random() < 0.3
        hang_up(requests, chance)
    if family == "many answers":
        for request in requests:
            if chance.random() < 0.5:
                request["n"] = chance.choice([2, 3])
        hang_up(requests, chance)
    if family == "drafts":
        tokens = chance.choice([1, 2, 3, 5])
        config["speculative"] = {
            "method": chance.choice(["eagle", "eagle", "draft_model", "ngram"]),
            "num_speculative_tokens": tokens,
            "acceptance_rate": chance.choice([0.0, 0.5, 0.9, 1.0]),
        }
        config["max_num_batched_tokens"] += (tokens + 1) * seats
        config["num_blocks"] = 1 + need + -(-3 * (tokens + 1) // size) + chance.choice([need // 8, need // 2, 3 * need])
        config["schedule_conservativeness"] = chance.choice([1.0, 0.1, 0.02])
    least = -(-(config["max_num_seqs"] + size) // size) * size
    config["max_num_batched_tokens"] = max(config["max_num_batched_tokens"], least)
    assert given["policy"] == "fcfs"
    return {"name": f"{family} {seed}", "config": config, "cost": COST, "requests": requests}


def hang_up(requests: list[dict[str, Any]], chance: Random) -> None:
    """Let the clients of some requests hang up."""
    for request in requests:
        if chance.random() < 0.4:
            request["abort_ns"] = request["arrival_ns"] + chance.choice([1, 900, 2500, 9000, 40000, 120_000])


def longer(requests: list[dict[str, Any]], chance: Random) -> list[dict[str, Any]]:
    """Return the requests with ten times as many tokens in each segment and answer, so that steps come in runs."""
    factor = chance.choice([3, 10])
    return [
        request
        | {
            "prompt": [[name, tokens * factor] for name, tokens in request["prompt"]],
            "output_len": request["output_len"] * factor,
        }
        | ({"max_tokens": request["max_tokens"] * factor} if "max_tokens" in request else {})
        for request in requests
    ]
