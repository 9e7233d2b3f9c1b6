"""Internal fragmentation: the share of reserved KV memory that holds no token.

It follows from when requests ran and how long they were. Tokens are assumed to come evenly: the prompt's from its first
step to its first token, the output's from there to the last token. With pages, half a block less half a token is then
empty on average. A contiguous reservation is empty beyond its tokens.
"""

from __future__ import annotations

import numpy as np

from serving.deployments.config import SchedulerConfig
from traces.numeric_columns import Floats

_PIECE = 1 << 16  # requests at a time: clearing temporaries of a million takes longer than using them


def internal_fragmentation(requests: dict[str, Floats], config: SchedulerConfig) -> float | None:
    """Return the share of token-time that the requests of one run reserved and left empty.

    `requests` has the columns `prompt_tokens`, `output_tokens`, `scheduled_ns`, `first_token_ns` and `finish_ns`. A
    request that lacks one does not count. None if no request has all of them, and for models in which some layers do
    not keep every token.
    """
    if config.kv_groups or config.state_blocks:
        return None
    used = reserved = 0.0
    for first in range(0, len(requests["prompt_tokens"]), _PIECE):
        columns = np.stack([column[first : first + _PIECE] for column in requests.values()])
        times = _token_time(columns[:, np.isfinite(columns).all(axis=0)], config)
        used, reserved = used + times[0], reserved + times[1]
    return 1.0 - used / reserved if reserved > 0 else None


def _token_time(columns: Floats, config: SchedulerConfig) -> tuple[float, float]:
    """Return the space that requests used and the space reserved for them, in tokens times nanoseconds."""
    prompts, outputs, scheduled, first, last = columns
    prefill, decode = first - scheduled, last - first
    used = prompts / 2 * prefill + (prompts + (outputs - 1) / 2) * decode
    if config.kv_reservation == "paged":
        reserved = used + (config.block_size - 1) / 2 * (prefill + decode)
    else:
        tokens = np.full_like(prompts, config.max_model_len)
        if config.kv_reservation == "max_tokens":
            tokens = np.minimum(tokens, prompts + np.maximum(outputs, config.kv_reserved_max_tokens))
        reserved = np.ceil(tokens / config.block_size) * config.block_size * (prefill + decode)
    return float(used.sum()), float(reserved.sum())
