"""The settings of one of our schedulers in vLLM, from vLLM's configuration, and settings that it cannot follow.

vLLM's own settings apply wherever it has one. Settings that only our policies have, and the policy's name, come from
`--additional-config '{"tokentwin": {"policy": "edf", "scheduler": {"edf_ttft_ms": {"chat": 500}}}}'`. This module reads
vLLM's objects by their attributes and imports nothing of vLLM; some releases lack some of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tokentwin.serving.deployments.config import SchedulerConfig, parse
from tokentwin.serving.deployments.engines import release_settings
from tokentwin.serving.errors import UserError
from tokentwin.vllmside.record_settings import RecordSettings

_VLLMS = (
    "max_num_seqs", "max_num_active_seqs", "max_num_batched_tokens", "max_num_scheduled_tokens", "policy",
    "enable_chunked_prefill", "long_prefill_token_threshold", "long_prefill_token_threshold_adaptive",
    "scheduler_reserve_full_isl", "watermark", "async_scheduling",
)  # fmt: skip
_ALSO_VLLMS = (
    "max_model_len", "cut_at_max_model_len", "block_size", "num_blocks", "enable_prefix_caching", "kv_groups",
    "mamba_cache_mode", "prefix_cache_retention_interval", "prefill_schedule_interval", "self_preemption_ends_step",
)  # fmt: skip
VLLM_SETTINGS = _VLLMS + _ALSO_VLLMS
_NOT_IN_VLLM = (
    "state_blocks", "decode_stagger", "speculative", "kv_reservation", "kv_reserved_max_tokens", "kv_eviction",
)  # fmt: skip
_DEFAULT_POLICY = "vllm"
_OURS = "additional_config.tokentwin"
_LEAVE_OUT = "cannot be combined with a policy of tokentwin's; leave it out"


def policy_and_settings(
    vllm_config: Any, kv_cache_config: Any, block_size: int, hash_block_size: int | None, version: str
) -> tuple[str, SchedulerConfig]:
    """Return the name and the settings of the policy in vLLM `version`.

    Raises UserError for a setting that is unknown or that our scheduler cannot follow.
    """
    for name, value in not_carried(vllm_config, kv_cache_config, block_size, hash_block_size):
        raise UserError(name, value, _LEAVE_OUT)
    additional = getattr(vllm_config, "additional_config", None)
    ours = additional.get("tokentwin", {}) if isinstance(additional, dict) else {}
    if not isinstance(ours, dict):
        raise UserError(_OURS, ours, 'must be a mapping, as in {"policy": "fair"}')
    for name in sorted(ours.keys() - {"policy", "scheduler", *RecordSettings.model_fields}):
        raise UserError(f"{_OURS}.{name}", ours[name], "is not a setting; there are policy and scheduler")
    policy, more = ours.get("policy", _DEFAULT_POLICY), ours.get("scheduler", {})
    if not isinstance(policy, str):
        raise UserError(f"{_OURS}.policy", policy, "must be a name, path/to/file.py:Class or package.module:Class")
    if not isinstance(more, dict):
        raise UserError(f"{_OURS}.scheduler", more, "must be a mapping of settings")
    for name in more:
        if name in VLLM_SETTINGS:
            raise UserError(f"{_OURS}.scheduler.{name}", more[name], "is vLLM's to set; use its own option")
        if name in _NOT_IN_VLLM:
            raise UserError(f"{_OURS}.scheduler.{name}", more[name], "has no meaning inside of vLLM; leave it out")
    settings = {**_settings(vllm_config, kv_cache_config, block_size), **release_settings(version), **more}
    return policy, parse(SchedulerConfig, settings, where=f"{_OURS}.scheduler")


def _settings(vllm_config: Any, kv_cache_config: Any, block_size: int) -> dict[str, Any]:
    scheduler = vllm_config.scheduler_config
    settings = {name: getattr(scheduler, name) for name in _VLLMS if hasattr(scheduler, name)}
    settings["async_scheduling"] = bool(settings["async_scheduling"])  # None if nobody has decided
    windows = [getattr(group.kv_cache_spec, "sliding_window", None) or 0 for group in kv_cache_config.kv_cache_groups]
    if any(windows):
        settings["kv_groups"] = windows
        settings["prefix_cache_retention_interval"] = getattr(kv_cache_config, "prefix_cache_retention_interval", None)
    settings["max_model_len"] = vllm_config.model_config.max_model_len
    settings["cut_at_max_model_len"] = True
    settings["block_size"] = block_size
    settings["num_blocks"] = kv_cache_config.num_blocks
    settings["enable_prefix_caching"] = bool(vllm_config.cache_config.enable_prefix_caching)
    return settings


def not_carried(
    vllm_config: Any, kv_cache_config: Any, block_size: int, hash_block_size: int | None
) -> Iterator[tuple[str, Any]]:
    """Yield name and value of vLLM's settings that our scheduler cannot follow."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    for name in ("speculative_config", "kv_transfer_config", "ec_transfer_config", "lora_config", "diffusion_config"):
        if getattr(vllm_config, name, None) is not None:
            yield name, "set"
    events = getattr(vllm_config, "kv_events_config", None)
    if events is not None and events.enable_kv_cache_events:
        yield "kv_events_config.enable_kv_cache_events", True
    if getattr(vllm_config.observability_config, "kv_cache_metrics", False):
        yield "kv_cache_metrics", True
    if model.runner_type != "generate":
        yield "runner", model.runner_type
    for name in ("is_encoder_decoder", "supports_multimodal_inputs", "enable_prompt_embeds"):
        if getattr(model, name, False):
            yield f"model: {name}", True
    for name in ("pipeline", "data", "decode_context", "prefill_context"):
        if (size := getattr(parallel, f"{name}_parallel_size", 1)) > 1:
            yield f"{name}_parallel_size", size
    if getattr(vllm_config.scheduler_config, "prefill_schedule_interval", 1) > 1:
        yield "prefill_schedule_interval", vllm_config.scheduler_config.prefill_schedule_interval
    if hash_block_size not in (None, block_size):
        yield "hash_block_size", hash_block_size
    for group in kv_cache_config.kv_cache_groups:
        kinds = {kind.__name__ for kind in type(group.kv_cache_spec).__mro__}
        if not kinds & {"FullAttentionSpec", "SlidingWindowSpec"} or group.kv_cache_spec.block_size != block_size:
            yield "KV cache of the model", type(group.kv_cache_spec).__name__
    if getattr(kv_cache_config, "needs_kv_cache_zeroing", False):
        yield "KV cache of the model", "blocks that must be zeroed"


def request_not_carried(request: Any) -> str:
    """Return the names of features of `request` that our scheduler cannot handle; empty if there are none."""
    embedded = getattr(request, "prompt_embeds", None) is not None
    reasons = {
        "structured output": getattr(request, "structured_output_request", None) is not None,
        "pooling": request.pooling_params is not None,
        "LoRA": request.lora_request is not None,
        "media": bool(request.mm_features),
        "embeddings as a prompt": embedded or request.prompt_token_ids is None,
        "a prompt that goes on": bool(getattr(request, "resumable", False)),
    }
    return ", ".join(name for name, has in reasons.items() if has)
