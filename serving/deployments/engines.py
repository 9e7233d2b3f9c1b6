"""The serving engines: their names and releases, the rules of older releases, and the steps that run as CUDA graphs.

Step times are corrected by measured runs of the same engine.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tokentwin.serving.deployments.config import Deployment
    from tokentwin.serving.deployments.gpu_spec import GpuSpec


ENGINES = ("vllm", "sglang", "trtllm")
_STATED = re.compile(rf"({'|'.join(ENGINES)})( \d+\.\d+(\.\d+)?)?")
_RELEASE = re.compile(r"\d+\.\d+(\.\d+)?")
UTILIZATION = 0.92  # share of GPU memory that vLLM 0.33 uses; 0.9 in earlier versions
BLOCK_SIZE = 16
_PROMPTS_CAPTURED_SINCE = (0, 8)  # first release of vLLM with the V1 engine by default
_LARGER_GRAPHS_SINCE = (0, 28)  # first release of vLLM with CUDA graphs of 1,024 tokens on data-center Blackwell
# vLLM before 0.33: a request that preempts itself ends the step, a state that is read defers hits, and
# `prefill_schedule_interval` only spaces the prompts of data-parallel ranks.
_BEFORE_0_33 = {"self_preemption_ends_step": True, "prefill_schedule_interval": 1, "state_read_defers_hits": True}


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
    def numbers(self) -> tuple[int, ...] | None:
        """All numbers of the release, such as (0, 5, 6); None if none is stated."""
        return tuple(int(part) for part in self.version.split(" ")[-1].split(".")) if self.version else None

    @property
    def release(self) -> tuple[int, ...] | None:
        """Major and minor number of the release; None if none is stated."""
        return self.numbers[:2] if self.numbers else None

    def __str__(self) -> str:
        return self.version or self.name


def check_engine(stated: str | None) -> str | None:
    """Return `stated` if it is None or a name in `ENGINES`, with or without a release. Raises ValueError otherwise."""
    if stated is not None and not _STATED.fullmatch(stated):
        raise ValueError(f"must be {', '.join(ENGINES[:-1])} or {ENGINES[-1]}, with or without a release: sglang 0.5.6")
    return stated


def captures_prompts(engine: EngineName) -> bool:
    """Return whether an engine runs steps with prompts as CUDA graphs: vLLM, but not its V0 engine."""
    return engine.name == "vllm" and (engine.release is None or engine.release >= _PROMPTS_CAPTURED_SINCE)


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
    if not captures_prompts(engine):
        return 0
    large = gpu.generation == "Blackwell" and (engine.release is None or engine.release >= _LARGER_GRAPHS_SINCE)
    queries = 1 + (scheduler.speculative.num_speculative_tokens if scheduler.speculative else 0)
    return min(2 * scheduler.max_num_seqs * queries, 1024 if large else 512, scheduler.max_num_batched_tokens)


def release_settings(version: str, adapters: bool = False, images: bool = False) -> dict[str, Any]:
    """Return the settings of vLLM release `version`, e.g. 0.32.0 or 0.32.0+cpu, for `adapters` or `images` if asked.

    Raises ValueError for other text.
    """
    major, minor, *_ = version.split(".")
    if (int(major), int(minor)) >= (0, 33):
        return {}
    of_adapters = {"adapter_slots_by_step": True} if adapters else {}
    return {**_BEFORE_0_33, **of_adapters, **({"encoder_holds_queue": True} if images else {})}
