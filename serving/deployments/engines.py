"""The serving engines: their names and releases, the rules of older releases, and the defaults of their servers.

Step times are corrected by measured runs of the same engine. A default replaces a setting that a command line leaves
out: the limits of a step and the kind of loop. Defaults depend on the engine and the GPU. vLLM's defaults are those of
its API server (`EngineArgs.get_batch_defaults`, `VllmConfig.__post_init__` of release 0.33). Larger GPUs get larger
steps and more requests at once, except the A100, whose throughput falls with larger steps. SGLang chooses its prompt
chunk size by memory, and divides it by the data-parallel ranks (`ServerArgs`), and TensorRT-LLM has one token budget
(`max_num_tokens`). Both run at least 2,048 requests at once; here they have vLLM's limit of requests. With a higher
limit, the memory for sampling would reduce the estimated number of KV blocks.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from serving.deployments.config import Deployment
    from serving.deployments.gpu_spec import GpuSpec


ENGINES = ("vllm", "sglang", "trtllm")
_STATED = re.compile(rf"({'|'.join(ENGINES)})( \d+\.\d+(\.\d+)?)?")
_RELEASE = re.compile(r"\d+\.\d+(\.\d+)?")
UTILIZATION = 0.92  # share of GPU memory that vLLM 0.33 uses; 0.9 in earlier versions
BLOCK_SIZE = 16
_VLLM = "0.33"  # the release that is assumed if none is stated
_GIB = 1024**3
_OVERLAPS_SINCE = (0, 14)  # first release of vLLM whose loop is overlapped by default
_LARGEST_SINCE = (0, 28)  # first release known to have a larger token budget on GPUs of 160 GiB
_LARGER_GRAPHS_SINCE = (0, 28)  # first release of vLLM with CUDA graphs of 1,024 tokens on data-center Blackwell
_DEEPEP_TOKENS = 256  # token budget of a rank that exchanges tokens by low-latency DeepEP
# (GiB, prompt chunk in tokens on GPUs with less memory than this)
_SGLANG_CHUNKS = ((35, 2048), (60, 4096), (160, 8192))
_SGLANG_SINCE_0_5_3 = (60, 4096)
_SGLANG_LARGEST_CHUNK = 16384
_TRTLLM_TOKENS = 8192
# vLLM before 0.33: a request that preempts itself ends the step, and `prefill_schedule_interval` only spaces the
# prompts of data-parallel ranks.
_BEFORE_0_33 = {"self_preemption_ends_step": True, "prefill_schedule_interval": 1}


class EngineName(NamedTuple):
    """The name of an engine, and its `version`: name and release, e.g. `sglang 0.5.6`, or empty if none is stated."""

    name: str
    version: str = ""

    @classmethod
    def read(cls, text: str) -> EngineName:
        """Read a name such as `vLLM 0.19.0`, as people write it.

        An unknown name is read as vLLM. A nightly build has no release.
        """
        name = text.split(" ")[0].lower().replace("-", "").replace("tensorrt", "trt")
        engine = name if name in ENGINES else "vllm"
        release = None if "nightly" in text else _RELEASE.search(text)
        return cls(engine, f"{engine} {release[0]}" if release else "")

    @property
    def release(self) -> tuple[int, ...] | None:
        """Major and minor number of the release; None if none is stated."""
        return tuple(int(part) for part in self.version.split(" ")[-1].split(".")[:2]) if self.version else None

    def __str__(self) -> str:
        return self.version or self.name


def check_engine(stated: str | None) -> str | None:
    """Return `stated` if it is None or a name in `ENGINES`, with or without a release. Raises ValueError otherwise."""
    if stated is not None and not _STATED.fullmatch(stated):
        raise ValueError(f"must be {', '.join(ENGINES[:-1])} or {ENGINES[-1]}, with or without a release: sglang 0.5.6")
    return stated


def captured_tokens(deployment: Deployment, gpu: GpuSpec) -> int:
    """Return the number of tokens of the largest step with prompts that runs as a CUDA graph.

    vLLM's default is twice the tokens of a step in which all sequences decode, up to a limit
    (`VllmConfig._set_cudagraph_sizes` of releases 0.20 to 0.33).
    """
    stated, scheduler, engine = deployment.max_cudagraph_capture_size, deployment.scheduler, deployment.engine_name
    if deployment.enforce_eager:
        return 0
    if stated is not None:
        return stated
    if engine.name != "vllm":
        return 0
    large = gpu.generation == "Blackwell" and (engine.release is None or engine.release >= _LARGER_GRAPHS_SINCE)
    queries = 1 + (scheduler.speculative.num_speculative_tokens if scheduler.speculative else 0)
    return min(2 * scheduler.max_num_seqs * queries, 1024 if large else 512, scheduler.max_num_batched_tokens)


def with_engine_defaults(deployment: Deployment, gpu: GpuSpec) -> Deployment:
    """Return `deployment` with its engine's defaults on `gpu` for all scheduler settings that it does not state."""
    stated = deployment.scheduler.model_fields_set
    settings = engine_defaults(deployment, gpu)
    return deployment.rescheduled(**{name: value for name, value in settings.items() if name not in stated})


def defaults_taken(deployment: Deployment, gpu: GpuSpec) -> str:
    """Return a list, as text, of the engine's defaults that `deployment` uses on `gpu`; empty if it uses none."""
    stated = deployment.scheduler.model_fields_set
    settings = engine_defaults(deployment, gpu)
    left = [f"{name} {_shown(value)}" for name, value in settings.items() if name not in stated]
    engine = deployment.engine_name
    release = str(engine) if engine.version or engine.name != "vllm" else f"vllm {_VLLM}"
    return f"defaults of {release} on {gpu.name}: {', '.join(left)}" if left else ""


def engine_defaults(deployment: Deployment, gpu: GpuSpec) -> dict[str, Any]:
    """Return the engine's default settings on `gpu` by name; they depend on what `deployment` states."""
    from serving.deployments.model_catalogue import pooling_model  # imports this module

    scheduler, engine = deployment.scheduler, deployment.engine_name
    stated, memory = scheduler.model_fields_set, gpu.memory_bytes / _GIB
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
    tokens = min(tokens, (scheduler.max_num_seqs if "max_num_seqs" in stated else seqs) * longest)
    most = scheduler.max_num_batched_tokens if "max_num_batched_tokens" in stated else tokens
    return {
        "max_num_seqs": min(seqs, most),
        "max_num_batched_tokens": tokens,
        "async_scheduling": overlaps,
    }


def _sglang_has_three_chunks(engine: EngineName) -> bool:
    """Return whether this release of SGLang has a chunk of its own for GPUs of 35 to 60 GiB: those since 0.5.3."""
    patch = [int(part) for part in engine.version.split(" ")[-1].split(".")] if engine.version else [0, 5, 3]
    return patch >= [0, 5, 3]


def _shown(value: bool | int) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:,}"


def release_settings(version: str) -> dict[str, Any]:
    """Return the settings of vLLM release `version`, e.g. 0.32.0 or 0.32.0+cpu. Raises ValueError for other text."""
    major, minor, *_ = version.split(".")
    return dict(_BEFORE_0_33) if (int(major), int(minor)) < (0, 33) else {}
