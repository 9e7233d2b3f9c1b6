"""Defaults of an engine's server for settings that its command line leaves out: limits of a step and the loop.

They depend on engine and GPU. vLLM's are those of its API server (`EngineArgs.get_batch_defaults`,
`VllmConfig.__post_init__` of release 0.33): larger GPUs get larger steps and more requests at once, except the A100,
whose throughput larger steps lower. SGLang sizes its chunks of prompts by memory (`ServerArgs`), and TensorRT-LLM has
one budget (`max_num_tokens`). Neither bounds requests by less than 2,048; they have vLLM's bound here, because sampling
for more would take memory from KV.
"""

from __future__ import annotations

from typing import Any

from serving.deployments.config import Deployment
from serving.deployments.gpu_spec import GpuSpec

UTILIZATION = 0.92  # share of the memory of a GPU in vLLM 0.33; 0.9 in versions before
BLOCK_SIZE = 16
_VLLM = "0.33"  # the release that is meant if no release is stated
_GIB = 1024**3
_OVERLAPS_SINCE = (0, 14)  # first release of vLLM whose loop is overlapped by default
_LARGEST_SINCE = (0, 28)  # the first release seen to have more tokens for GPUs of 160 GiB
_DEEPEP_TOKENS = 256  # tokens of a rank whose experts are reached by low-latency DeepEP
_SGLANG_CHUNKS = ((35, 2048), (60, 4096), (160, 8192))  # (GiB of memory, tokens of a chunk on GPUs with less memory)
_SGLANG_LARGEST_CHUNK = 16384
_TRTLLM_TOKENS = 8192


def with_engine_defaults(deployment: Deployment, gpu: GpuSpec) -> Deployment:
    """Return `deployment` on `gpu` with its engine's defaults for the scheduler settings that it does not state."""
    stated = deployment.scheduler.model_fields_set
    settings = engine_defaults(deployment, gpu)
    return deployment.rescheduled(**{name: value for name, value in settings.items() if name not in stated})


def defaults_taken(deployment: Deployment, gpu: GpuSpec) -> str:
    """Return the settings that `deployment` leaves to its engine on `gpu`, with their values; empty if none."""
    stated = deployment.scheduler.model_fields_set
    settings = engine_defaults(deployment, gpu)
    left = [f"{name} {_shown(value)}" for name, value in settings.items() if name not in stated]
    engine = deployment.engine_name
    release = str(engine) if engine.version or engine.name != "vllm" else f"vllm {_VLLM}"
    return f"defaults of {release} on {gpu.name}: {', '.join(left)}" if left else ""


def engine_defaults(deployment: Deployment, gpu: GpuSpec) -> dict[str, Any]:
    """Return the default settings by name, given the settings that `deployment` states."""
    scheduler, engine = deployment.scheduler, deployment.engine_name
    stated, memory = scheduler.model_fields_set, gpu.memory_bytes / _GIB
    release = tuple(int(part) for part in engine.version.split(" ")[-1].split(".")[:2]) if engine.version else None
    large = memory >= 70 and "a100" not in gpu.name.lower()
    seqs, tokens, overlaps = (1024, 8192, True) if large else (256, 2048, True)
    if engine.name == "sglang":
        tokens = next((chunk for below, chunk in _SGLANG_CHUNKS if memory < below), _SGLANG_LARGEST_CHUNK)
    elif engine.name == "trtllm":
        tokens = _TRTLLM_TOKENS
    else:
        if memory >= 160 and (release is None or release >= _LARGEST_SINCE):
            tokens = 16384
        if deployment.all2all_backend == "deepep_low_latency":
            tokens = _DEEPEP_TOKENS
        overlaps = release is None or release >= _OVERLAPS_SINCE
    if not scheduler.enable_chunked_prefill:
        tokens = max(tokens, scheduler.max_model_len)
    tokens = min(tokens, (scheduler.max_num_seqs if "max_num_seqs" in stated else seqs) * scheduler.max_model_len)
    most = scheduler.max_num_batched_tokens if "max_num_batched_tokens" in stated else tokens
    return {
        "max_num_seqs": min(seqs, most),
        "max_num_batched_tokens": tokens,
        "async_scheduling": overlaps,
    }


def _shown(value: bool | int) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:,}"
