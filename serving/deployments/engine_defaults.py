"""The defaults of the engines' servers, which replace settings that a command line leaves out.

They are the limits of a step, the length of a request and the kind of loop, and depend on the engine, the GPU and the
model. vLLM's defaults are those of its API server (`EngineArgs.get_batch_defaults`, `VllmConfig.__post_init__` of
release 0.33). Larger GPUs get larger steps and more requests at once, except the A100, whose throughput falls with
larger steps. SGLang chooses its prompt chunk size by memory, and divides it by the data-parallel ranks (`ServerArgs`),
and TensorRT-LLM has one token budget (`max_num_tokens`). Both run at least 2,048 requests at once; here they have
vLLM's limit of requests. With a higher limit, the memory for sampling would reduce the estimated number of KV blocks. A
request may have the model's length; where the KV cache is too small for that, as many tokens as fit (vLLM's `--max-
model-len auto`).
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.engines import BLOCK_SIZE, EngineName
from tokentwin.serving.deployments.gpu_spec import GpuSpec
from tokentwin.serving.deployments.kv_capacity import kv_capacity
from tokentwin.serving.deployments.kv_layout import most_held, with_kv_groups
from tokentwin.serving.deployments.model_catalogue import find_model, pooling_model

_VLLM = "0.33"  # the release that is assumed if none is stated
_GIB = 1024**3
_OVERLAPS_SINCE = (0, 14)  # first release of vLLM whose loop is overlapped by default
_LARGEST_SINCE = (0, 28)  # first release known to have a larger token budget on GPUs of 160 GiB
_DEEPEP_TOKENS = 256  # token budget of a rank that exchanges tokens by low-latency DeepEP
# (GiB, prompt chunk in tokens on GPUs with less memory than this)
_SGLANG_CHUNKS = ((35, 2048), (60, 4096), (160, 8192))
_SGLANG_SINCE_0_5_3 = (60, 4096)
_SGLANG_LARGEST_CHUNK = 16384
_TRTLLM_TOKENS = 8192


def with_engine_defaults(deployment: Deployment, gpu: GpuSpec) -> tuple[Deployment, str]:
    """Return `deployment` with its engine's defaults on `gpu` for all scheduler settings that it does not state.

    The text lists these settings with their values; it is empty if there are none.
    """
    taken = _open(deployment, engine_defaults(deployment, gpu))
    if not taken:
        return deployment, ""
    engine, listed = deployment.engine_name, ", ".join(f"{name} {_shown(value)}" for name, value in taken.items())
    release = str(engine) if engine.version or engine.name != "vllm" else f"vllm {_VLLM}"
    return deployment.rescheduled(**taken), f"defaults of {release} on {gpu.name}: {listed}"


def engine_defaults(deployment: Deployment, gpu: GpuSpec) -> dict[str, Any]:
    """Return the engine's default settings on `gpu` by name; they depend on what `deployment` states."""
    scheduler, engine = deployment.scheduler, deployment.engine_name
    states, memory = scheduler.states, gpu.memory_bytes / _GIB
    release = engine.release
    large = memory >= 70 and "a100" not in gpu.name.lower()
    seqs, tokens, overlaps = (1024, 8192, True) if large else (256, 2048, True)
    if engine.name == "sglang":
        chunks = [pair for pair in _SGLANG_CHUNKS if pair != _SGLANG_SINCE_0_5_3 or _sglang_has_three_chunks(engine)]
        tokens = next((chunk for below, chunk in chunks if memory < below), _SGLANG_LARGEST_CHUNK)
        tokens = max(tokens // deployment.data_parallel_size, 1)
    elif engine.name == "trtllm":
        tokens = _TRTLLM_TOKENS
    else:
        if memory >= 160 and (release is None or release >= _LARGEST_SINCE):
            tokens = 16384
        if deployment.all2all_backend == "deepep_low_latency":
            tokens = _DEEPEP_TOKENS
        overlaps = release is None or release >= _OVERLAPS_SINCE
    pooling, longest = pooling_model(deployment.model), scheduler.max_model_len
    if pooling is not None:  # as vLLM's defaults for pooling models (`VllmConfig.__post_init__` of release 0.32)
        overlaps, longest = False, min(longest, pooling.max_positions)
    if not scheduler.enable_chunked_prefill or (pooling is not None and pooling.whole_prompts):
        tokens = max(tokens, longest)
    tokens = min(tokens, (scheduler.max_num_seqs if states("max_num_seqs") else seqs) * longest)
    most = scheduler.max_num_batched_tokens if states("max_num_batched_tokens") else tokens
    sharing = deployment.decode_context_parallel_size
    blocks = {"block_size": BLOCK_SIZE * sharing} if sharing > 1 else {}  # of all devices that share the tokens
    settings = {
        **blocks,
        "max_num_seqs": min(seqs, most),
        "max_num_batched_tokens": tokens,
        "async_scheduling": overlaps,
    }
    if states("max_model_len") or pooling is not None:
        return settings
    return {**settings, "max_model_len": _longest(deployment.rescheduled(**_open(deployment, settings)), gpu)}


def _open(deployment: Deployment, settings: dict[str, Any]) -> dict[str, Any]:
    """Return those of the scheduler's `settings` that `deployment` does not state."""
    return {name: value for name, value in settings.items() if not deployment.scheduler.states(name)}


def _longest(deployment: Deployment, gpu: GpuSpec) -> int:
    """Return the maximum length of a request in tokens: the model's, or as much as fits into the KV cache.

    It is not below the default of `SchedulerConfig`, so that a GPU that is too small is refused, nor above it if a
    prompt or the memory of a request is never split, because steps and reservations would be of that length.
    """
    scheduler = deployment.scheduler
    model, default = find_model(deployment.model), scheduler.max_model_len
    if not scheduler.enable_chunked_prefill or scheduler.kv_reservation != "paged":
        return min(default, model.max_positions)
    blocks = scheduler.num_blocks
    if not scheduler.states("num_blocks"):
        blocks = kv_capacity(model, gpu, deployment).num_blocks
    grouped = with_kv_groups(deployment).scheduler

    def tokens_beyond_room(tokens: int) -> bool:
        return most_held(grouped.model_copy(update={"max_model_len": tokens}), tokens) >= blocks

    lengths = range(default, model.max_positions + 1)
    fitting = bisect_left(lengths, True, key=tokens_beyond_room)
    return lengths[max(fitting - 1, 0)] if lengths else model.max_positions


def _sglang_has_three_chunks(engine: EngineName) -> bool:
    """Return whether this release of SGLang has a chunk of its own for GPUs of 35 to 60 GiB: those since 0.5.3."""
    return engine.numbers is None or engine.numbers >= (0, 5, 3)


def _shown(value: bool | int) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:,}"
