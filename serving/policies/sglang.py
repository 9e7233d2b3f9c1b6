"""The `sglang` policy: SGLang's scheduler, or an outline of it where the exact one lacks a feature.

`sglang_scheduler.py` decides exactly as SGLang 0.5.23. It covers models with full attention in one engine of one stage.
With sliding windows, constant states, adapters, encoders, KV from outside or pipeline stages, and for drafts with mixed
chunks or with a length that depends on the batch, the outline decides: `sglang_outline.py`.
"""

from __future__ import annotations

from typing import Any

from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.policies.sglang_outline import SglangOutline
from tokentwin.serving.policies.sglang_scheduler import SglangScheduler


def is_exact(config: SchedulerConfig) -> bool:
    """Return whether an engine with this `config` decides exactly as SGLang does."""
    others = config.kv_groups or config.state_blocks or config.max_loras or config.sglang_outline
    others = others or config.max_num_encoder_input_tokens is not None
    if (drafts := config.speculative) is not None:
        others = others or config.enable_mixed_chunk or drafts.num_speculative_tokens_per_batch_size is not None
    return not others and config.kv_reservation == "paged"


class Sglang(SglangOutline):
    """SGLang's scheduler if `is_exact`, otherwise the outline."""

    def __new__(cls, config: SchedulerConfig, *, content: Any = None, **engine: Any) -> Any:
        if is_exact(config):
            return SglangScheduler(config, content=content)
        return super().__new__(cls)
