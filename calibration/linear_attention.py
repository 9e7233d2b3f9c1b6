"""Layers with a gated delta net as operations: the convolution and the delta rule.

Prompts use the chunked form (Yang et al., arXiv:2412.06464, section 3.3): attention within chunks of 64 tokens, and one
update of each head's state per chunk. A decode row reads and writes its states, which do not grow with its context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tokentwin.calibration.operations import Amount, Operation, StepSizes
from tokentwin.serving.deployments.attention import LinearAttention
from tokentwin.serving.deployments.weight_types import DTYPE_BYTES

_CHUNK = 64  # tokens, as in the kernels that vLLM uses


@dataclass(frozen=True)
class LinearPrefill:
    """Linear attention of `rows` prompts with `tokens` tokens in all, for the key and value heads of one device."""

    name: str
    rows: Amount
    tokens: Amount
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    state_dtype: str = "float32"
    count: int = 1

    launches: ClassVar[int] = 9
    """vLLM's number of kernels: the convolution, norms of queries and keys, and six kernels of the chunked form."""

    @property
    def size(self) -> Amount:
        return self.tokens

    @property
    def channels(self) -> int:
        """Number of channels of the convolution."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def flops(self) -> Amount:
        """FLOPs of the convolution and the delta rule: three products with the state, and products within a chunk."""
        state = 6.0 * self.key_dim * self.value_dim
        chunk = 2.0 * _CHUNK * (3 * self.key_dim + 2 * self.value_dim)
        return self.tokens * (self.value_heads * (state + chunk) + 2.0 * self.kernel * self.channels)

    @property
    def state_bytes(self) -> float:
        """Bytes of one request's state in one layer."""
        state = DTYPE_BYTES[self.state_dtype] * self.value_heads * self.key_dim * self.value_dim
        return state + 2.0 * (self.kernel - 1) * self.channels

    @property
    def bytes(self) -> Amount:
        """Bytes of inputs, outputs and states, and of tensors that the kernels of the chunked form pass to one another.

        These tensors are decayed keys and values, a state for each chunk, and a chunk's row of scores for each token.
        """
        moved = 2.0 * (3 * self.channels + self.value_heads * self.value_dim)
        between = self.key_dim + self.value_dim + self.key_dim * self.value_dim / _CHUNK + _CHUNK
        moved += 4.0 * self.value_heads * between
        return self.tokens * moved + self.rows * (2.0 * self.state_bytes)


@dataclass(frozen=True)
class LinearDecode(LinearPrefill):
    """Linear attention of `rows` decode rows with `tokens` tokens in all.

    Each row's states are read once. They are written for every token of the row, because its draft tokens may be
    rejected.
    """

    launches: ClassVar[int] = 2

    @property
    def flops(self) -> Amount:
        state = 6.0 * self.key_dim * self.value_dim
        return self.tokens * (self.value_heads * state + 2.0 * self.kernel * self.channels)

    @property
    def bytes(self) -> Amount:
        moved = 2.0 * (3 * self.channels + self.value_heads * self.value_dim)
        return self.tokens * moved + (self.rows + self.tokens) * self.state_bytes


def linear_attention(linear: LinearAttention, tp: int, sizes: StepSizes, layers: int, dtype: str) -> list[Operation]:
    """Return the linear attention operations of one device; `dtype` is the type of the activations."""
    heads = max(linear.linear_num_key_heads // tp, 1), linear.linear_num_value_heads // tp
    shape = (*heads, linear.linear_key_head_dim, linear.linear_value_head_dim, linear.linear_conv_kernel_dim)
    kept = linear.mamba_ssm_dtype or dtype
    operations: list[Operation] = []
    if np.any(sizes.prefill_tokens):
        prompts = (sizes.prefill_rows, sizes.prefill_tokens)
        operations.append(LinearPrefill("prefill linear attention", *prompts, *shape, kept, layers))
    if np.any(sizes.decode_rows):
        rows = sizes.decode_rows
        operations.append(
            LinearDecode("decode linear attention", rows, rows + sizes.draft_tokens, *shape, kept, layers)
        )
    return operations
