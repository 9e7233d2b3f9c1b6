"""Gated delta networks (Yang et al., arXiv:2412.06464), as in Qwen3-Next and Qwen3.5: attention with a constant state.

A short convolution runs over queries, keys and values, then one matrix for each value head, which every token decays
and corrects. A request keeps the last inputs of the convolution and those matrices, which do not grow with its past.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from serving.settings import Settings


class LinearAttention(Settings):
    """The sizes of a linear attention, in elements, by the names that Hugging Face gives them."""

    linear_num_key_heads: int = Field(ge=1, description="number of query heads, and of key heads")
    linear_num_value_heads: int = Field(
        ge=1, description="number of value heads, a multiple of the key heads; each value head has a state"
    )
    linear_key_head_dim: int = Field(ge=1, description="rows of a state")
    linear_value_head_dim: int = Field(ge=1, description="columns of a state")
    linear_conv_kernel_dim: int = Field(ge=1, description="tokens that the convolution sees")
    mamba_ssm_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="data type of the states; null: the type of activations"
    )

    @property
    def key_dim(self) -> int:
        """The elements of all heads' keys."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """The elements of all heads' values."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """The channels of the convolution: queries, keys and values."""
        return 2 * self.key_dim + self.value_dim

    @property
    def conv_state(self) -> int:
        """The elements that the convolution keeps of a request."""
        return (self.linear_conv_kernel_dim - 1) * self.conv_dim

    @property
    def state(self) -> int:
        """The elements of a request's matrices."""
        return self.linear_key_head_dim * self.value_dim

    def parameters(self, hidden_size: int) -> int:
        """Return the weights of one layer's attention.

        They are the projection in, the convolution, decay and bias of each head, the norm, and the projection out.
        """
        into = hidden_size * (self.conv_dim + self.value_dim + 2 * self.linear_num_value_heads)
        own = self.linear_conv_kernel_dim * self.conv_dim + 2 * self.linear_num_value_heads
        return into + own + self.linear_value_head_dim + self.value_dim * hidden_size
