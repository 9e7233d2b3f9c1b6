"""The deployment of a running vLLM, read from its resolved configuration.

Settings are never guessed. A setting that cannot be expressed keeps its default and is named in `unmodelled`. Nothing
of vLLM is imported, so the configuration of any version can be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokentwin.serving.deployments.config import Deployment, parse
from tokentwin.serving.deployments.engines import release_settings

_SCHEDULER = (
    "max_num_seqs", "max_num_active_seqs", "max_num_batched_tokens", "max_num_scheduled_tokens",
    "enable_chunked_prefill", "long_prefill_token_threshold", "long_prefill_token_threshold_adaptive",
    "prefill_schedule_interval", "scheduler_reserve_full_isl", "watermark", "policy", "async_scheduling",
)  # fmt: skip
_KV_TYPES = {"auto": "auto", "fp8": "fp8", "fp8_e4m3": "fp8"}
_DRAFTS = {"ngram": "ngram", "draft_model": "draft_model", "eagle": "eagle", "eagle3": "eagle", "mtp": "mtp"}
_ALL2ALL = ("allgather_reducescatter", "deepep_low_latency", "deepep_high_throughput")
_DTYPES = ("float32", "bfloat16", "float16")
_OF_RELEASES = ("self_preemption_ends_step", "adapter_slots_by_step", "encoder_holds_queue")
_PROJECTIONS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
LEAST_BLOCKS = 2  # of a deployment; vLLM has one, which is never used, if no layer keeps KV
_WINDOWS = ("FullAttentionSpec", "SlidingWindowSpec", "MLAAttentionSpec")


@dataclass(frozen=True)
class VllmDeployment:
    """A `deployment`, and vLLM's settings that it cannot express (name -> value)."""

    deployment: Deployment
    unmodelled: Mapping[str, str]


def read_deployment(
    config: Any, kv_cache: Any, block_size: int, version: str, model: str = "", encoder: tuple[int, int] | None = None
) -> VllmDeployment:
    """Read a `VllmConfig` and a `KVCacheConfig` of vLLM `version` (such as 0.32.0).

    `model` replaces vLLM's name of the model. `encoder` is the encoder's budget of a step and the size of its cache, in
    embeddings; None for a model that reads text. Raises UserError for a combination of settings that no deployment can
    have.
    """
    reader = _Reader(config, kv_cache, block_size, encoder)
    stated = reader.settings()
    more = release_settings(version, adapters=stated["lora"] is not None, images=stated["multimodal"] is not None)
    stated["scheduler"] |= {name: value for name, value in more.items() if name in _OF_RELEASES}
    stated |= {"model": model or config.model_config.model, "engine": f"vllm {version}", "policy": "vllm"}
    deployment = parse(Deployment, stated, where="vllm_config")
    return VllmDeployment(deployment, reader.unmodelled)


class _Reader:
    def __init__(self, config: Any, kv_cache: Any, block_size: int, encoder: tuple[int, int] | None) -> None:
        self._encoder = encoder
        self.unmodelled: dict[str, str] = {}
        self._config = config
        self._kv_cache = kv_cache
        self._block_size = block_size

    def settings(self) -> dict[str, Any]:
        """Return every setting except names."""
        config, parallel = self._config, self._config.parallel_config
        model = config.model_config
        device = str(config.device_config.device_type)
        if device not in ("cpu", "cuda"):
            self.unmodelled["device_type"] = device
        shares_experts = bool(getattr(model, "is_moe", parallel.enable_expert_parallel))
        self._note_others()
        return {
            "device": "cpu" if device == "cpu" else "cuda",
            "dtype": self._one_of("dtype", str(model.dtype).removeprefix("torch."), _DTYPES),
            "quantization": self._quantization(),
            "kv_cache_dtype": _KV_TYPES.get(self._one_of("cache_dtype", config.cache_config.cache_dtype, _KV_TYPES)),
            "tensor_parallel_size": parallel.tensor_parallel_size,
            "pipeline_parallel_size": parallel.pipeline_parallel_size,
            "data_parallel_size": parallel.data_parallel_size if shares_experts else 1,
            "enable_expert_parallel": parallel.enable_expert_parallel,
            "all2all_backend": self._all2all(parallel),
            "enforce_eager": model.enforce_eager,
            "lora": self._adapters(),
            "multimodal": self._multimodal(),
            "scheduler": self._scheduler(),
        }

    def _scheduler(self) -> dict[str, Any]:
        config, cache = self._config, self._config.cache_config
        settings = config.scheduler_config
        read = {name: getattr(settings, name) for name in _SCHEDULER if hasattr(settings, name)}
        read |= {
            "max_model_len": config.model_config.max_model_len,
            "cut_at_max_model_len": True,
            "block_size": self._block_size,
            "num_blocks": self._kv_cache.num_blocks,
            "enable_prefix_caching": bool(cache.enable_prefix_caching),
            "kv_groups": self._windows(),
            "speculative": self._drafts(),
        }
        if not self._kv_cache.kv_cache_groups:  # an encoder, whose layers keep no KV
            read |= {"kv_reservation": "none", "enable_chunked_prefill": False, "enable_prefix_caching": False}
            read["num_blocks"] = LEAST_BLOCKS
        if read["kv_groups"] and hasattr(cache, "prefix_cache_retention_interval"):
            read["prefix_cache_retention_interval"] = cache.prefix_cache_retention_interval
        return read

    def _windows(self) -> tuple[int, ...]:
        """Return the sliding window of each group of layers in tokens; empty if all have full attention."""
        specs = [group.kv_cache_spec for group in self._kv_cache.kv_cache_groups]
        inner = [_inner(spec) for spec in specs]
        for spec in inner:
            if type(spec).__name__ not in _WINDOWS:
                self.unmodelled["kv_cache_groups"] = type(spec).__name__
                return ()
        windows = tuple(int(getattr(spec, "sliding_window", None) or 0) for spec in inner)
        windows = tuple(
            window if type(spec).__name__ == "SlidingWindowSpec" else 0
            for window, spec in zip(windows, inner, strict=True)
        )
        return windows if any(windows) else ()

    def _drafts(self) -> dict[str, Any] | None:
        stated = self._config.speculative_config
        if stated is None:
            return None
        method = _DRAFTS.get("mtp" if str(stated.method).endswith("mtp") else stated.method)
        if method is None:
            self.unmodelled["speculative_config.method"] = str(stated.method)
            return None
        drafts: dict[str, Any] = {"method": method, "num_speculative_tokens": stated.num_speculative_tokens}
        if method == "ngram":
            drafts |= {name: getattr(stated, name) for name in ("prompt_lookup_min", "prompt_lookup_max")}
        if method == "draft_model":
            drafts["model"] = stated.model
        return drafts

    def _adapters(self) -> dict[str, Any] | None:
        stated = getattr(self._config, "lora_config", None)
        if stated is None:
            return None
        lora = {name: getattr(stated, name) for name in ("max_loras", "max_lora_rank")}
        if stated.max_cpu_loras not in (None, stated.max_loras):
            lora["max_cpu_loras"] = stated.max_cpu_loras
        targets = getattr(stated, "target_modules", None)
        if targets and set(targets) <= set(_PROJECTIONS):
            lora["target_modules"] = targets
        elif targets:
            self.unmodelled["lora_config.target_modules"] = ", ".join(targets)
        return lora

    def _multimodal(self) -> dict[str, Any] | None:
        if self._encoder is None:
            return None
        budget, cache = self._encoder
        if budget != cache:
            self.unmodelled["encoder_cache_size"] = f"{cache}, not {budget} as the budget"
        mode = getattr(getattr(self._config.model_config, "multimodal_config", None), "mm_encoder_tp_mode", "weights")
        whole = bool(getattr(self._config.scheduler_config, "disable_chunked_mm_input", False))
        return {"max_item_tokens": budget, "disable_chunked_mm_input": whole, "mm_encoder_tp_mode": mode}

    def _quantization(self) -> str:
        """Return the quantization; `none` means that the weights have the types of the checkpoint."""
        model = self._config.model_config
        stored = getattr(model.hf_config, "quantization_config", None)
        if model.quantization is None or stored:
            return "none"
        return "fp8" if model.quantization == "fp8" else self._left("quantization", model.quantization, "none")

    def _all2all(self, parallel: Any) -> str:
        if parallel.data_parallel_size == 1 or not parallel.enable_expert_parallel:
            return _ALL2ALL[0]
        return self._one_of("all2all_backend", str(getattr(parallel, "all2all_backend", _ALL2ALL[0])), _ALL2ALL)

    def _one_of(self, name: str, value: str, known: Any) -> str:
        """Return `value` if it is in `known`; otherwise note it, and return the first known value."""
        return value if value in known else self._left(name, value, next(iter(known)))

    def _left(self, name: str, value: Any, instead: str) -> str:
        self.unmodelled[name] = str(value)
        return instead

    def _note_others(self) -> None:
        """Note features that change decisions or times but cannot be expressed in a deployment."""
        config, parallel = self._config, self._config.parallel_config
        for name in ("kv_transfer_config", "ec_transfer_config"):
            if getattr(config, name, None) is not None:
                self.unmodelled[name] = "is set"
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            if (size := getattr(parallel, name, 1)) > 1:
                self.unmodelled[name] = str(size)
        if getattr(config.model_config, "is_encoder_decoder", False):
            self.unmodelled["is_encoder_decoder"] = "true"


def _inner(spec: Any) -> Any:
    """Return one spec of a group whose layers differ only in size."""
    several = getattr(spec, "kv_cache_specs", None)
    return next(iter(several.values())) if several else spec
