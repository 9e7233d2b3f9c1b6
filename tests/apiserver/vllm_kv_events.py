"""Records the KV events that vLLM's own scheduler publishes, step by step, on a virtual clock.

    python -m tests.apiserver.vllm_kv_events tests/data/vllm/kv_events.json.gz

Needs vLLM 0.33 (its wheel alone, with what it imports, next to a torch for the CPU). No model and no GPU is needed: the
duration of a step is an integer function of its tokens.
"""

import gzip
import json
import os
import sys
import tempfile
from base64 import b64encode
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

BLOCK = 16
DEFAULT_SEED = "vllm-none-hash"  # where PYTHONHASHSEED is not set
COST = {"base_ns": 3_000_000, "per_token_ns": 20_000, "per_pair_ps": 3_000}
WAYS = [
    {"async_scheduling": False, "hash": "sha256", "hash_seed": DEFAULT_SEED, "integer_hashes": True},
    {"async_scheduling": True, "hash": "sha256_cbor", "hash_seed": "42", "integer_hashes": False},
]


def tokens(segment: str, count: int) -> range:
    """Return the tokens of a segment; segments share tokens only where they begin alike."""
    begin = crc32(segment.encode()) // 4
    return range(begin, begin + count)


def scenario() -> list[dict[str, Any]]:
    """Return conversations that share a system prompt, in few blocks: prefixes are hit, evicted and preempted."""
    draw, requests = Random(7), []
    talks: dict[int, list[tuple[str, int]]] = {talk: [("system", 40)] for talk in range(8)}
    for id in range(32):
        talk = draw.randrange(len(talks))
        said, output_len = draw.randint(5, 60), draw.randint(10, 70)
        prompt = [*talks[talk], (f"said:{id}", said)]
        requests.append({"id": id, "arrival_ns": id * 25_000_000, "prompt": prompt, "output_len": output_len})
        talks[talk] = [*prompt, (f"out:{id}", output_len)]
        if sum(count for _, count in talks[talk]) > 400:
            talks[talk] = talks[talk][:1]
    return requests


def config(way: dict[str, Any]) -> dict[str, Any]:
    """Return settings of the scheduler; one of `num_blocks` is the null block."""
    return {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "max_model_len": 1024,
        "block_size": BLOCK,
        "num_blocks": 41,
        "async_scheduling": way["async_scheduling"],
    }


def record(way: dict[str, Any]) -> list[str]:
    """Return the batches that vLLM publishes at time 0, in base 64."""
    os.environ.update(
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_TARGET_DEVICE="cpu",
        HF_HUB_OFFLINE="1",
        VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=str(int(way["integer_hashes"])),
    )
    os.environ.pop("PYTHONHASHSEED", None)
    if way["hash_seed"] != DEFAULT_SEED:
        os.environ["PYTHONHASHSEED"] = way["hash_seed"]
    import msgspec
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    hash_function = get_hash_fn_by_name(way["hash"])
    init_none_hash(hash_function)
    scheduler = _scheduler(way)
    batches: list[Any] = []
    scheduler.kv_event_publisher.publish = batches.append
    coming = scenario()
    waiting = {str(request["id"]): request for request in coming}
    produced = dict.fromkeys(waiting, 0)
    hasher = get_request_block_hasher(BLOCK, hash_function)
    in_flight: list[tuple[Any, ...]] = []
    depth, now_ns, free_ns = 1 + way["async_scheduling"], 0, 0
    while waiting or in_flight:
        while coming and coming[0]["arrival_ns"] <= now_ns:
            arrived = coming.pop(0)
            scheduler.add_request(
                Request(
                    request_id=str(arrived["id"]),
                    prompt_token_ids=[token for part in arrived["prompt"] for token in tokens(*part)],
                    sampling_params=SamplingParams(max_tokens=arrived["output_len"], ignore_eos=True),
                    pooling_params=None,
                    block_hasher=hasher,
                    arrival_time=float(arrived["arrival_ns"]),
                )
            )
        plan = scheduler.schedule()
        rows = {id: int(count) for id, count in plan.num_scheduled_tokens.items()}
        if rows:
            live = scheduler.requests
            parts = [(count, live[id].num_computed_tokens - count) for id, count in rows.items()]
            samples = [id for id in rows if live[id].num_computed_tokens >= live[id].num_tokens]
            free_ns = max(now_ns, free_ns) + _cost_ns(parts)
            in_flight.append((plan, list(rows), samples, free_ns))
            if len(in_flight) < depth:
                continue
        elif plan.preempted_req_ids and not in_flight:
            continue
        if not in_flight:
            now_ns = coming[0]["arrival_ns"]
            continue
        plan, ids, samples, end_ns = in_flight.pop(0)
        now_ns = max(now_ns, end_ns)
        sampled = []
        for id in ids:
            wanted = id in samples and id in waiting
            sampled.append([tokens(f"out:{id}", produced[id] + 1)[-1]] if wanted else [])
            produced[id] += wanted
        scheduler.update_from_output(
            plan,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={id: at for at, id in enumerate(ids)},
                sampled_token_ids=sampled,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
        for id in ids:
            if id in waiting and produced[id] == waiting[id]["output_len"]:
                del waiting[id]
    for batch in batches:
        batch.ts, batch.data_parallel_rank = 0.0, 0
    return [b64encode(msgspec.msgpack.encode(batch)).decode() for batch in batches]


def _cost_ns(parts: list[tuple[int, int]]) -> int:
    new = sum(count for count, _ in parts)
    pairs = sum(count * (2 * before + count + 1) // 2 for count, before in parts)
    return COST["base_ns"] + COST["per_token_ns"] * new + COST["per_pair_ps"] * pairs // 1000


def _scheduler(way: dict[str, Any]) -> Any:
    import torch
    from vllm.config import CacheConfig, DeviceConfig, KVEventsConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    settings = config(way)
    blocks = settings.pop("num_blocks")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_TINY))
        model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float16", max_model_len=1024)
    cache = CacheConfig(block_size=settings.pop("block_size"), enable_prefix_caching=True)
    whole = VllmConfig(
        scheduler_config=SchedulerConfig(is_encoder_decoder=False, **settings),
        model_config=model,
        cache_config=cache,
        device_config=DeviceConfig(device="cpu"),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    )
    cache.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return (AsyncScheduler if way["async_scheduling"] else Scheduler)(
        vllm_config=whole,
        kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(whole),
        block_size=BLOCK,
        log_stats=True,
    )


_TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}


if __name__ == "__main__":
    recording = [{"way": way, "batches": record(way)} for way in WAYS]
    Path(sys.argv[1]).write_bytes(gzip.compress(json.dumps(recording).encode(), mtime=0))
