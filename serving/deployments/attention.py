"""Kinds of attention that cache latent vectors or a constant state of a request, instead of keys and values.

Sizes are in elements. Their names are those of Hugging Face.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from tokentwin.serving.settings import Settings

SPARSE, HEAVY = 4, 128  # number of tokens that one entry compresses
BLOCK_SIZE = 256  # tokens of a KV block in vLLM: a whole number of entries of either kind
_WINDOW_PAGE = 64  # tokens of a page of the window; the window can begin in the middle of a page
_STATE_PAGES = {SPARSE: 4, HEAVY: 8}  # page size, in tokens, of the tokens that are not in an entry yet
_FLOAT_BYTES = 4


class LatentAttention(Settings):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): one small latent vector for the KV of all heads.

    Hidden states are projected down to a latent vector and one rotated key, which the cache keeps once for all heads.
    Prompts expand the latent vector into keys and values of every head. Decode rows apply the expansion to their
    queries and outputs instead, and attend to the latent vectors themselves. In DeepSeek-V3.2 (arXiv:2512.02556) and
    GLM-5 an indexer with its own small keys chooses the `index_topk` tokens to which a token attends.
    """

    q_lora_rank: int = Field(0, ge=0, description="rank of the queries' projection; 0: the projection is one matrix")
    kv_lora_rank: int = Field(ge=1, description="rank of the latent vector")
    qk_nope_head_dim: int = Field(
        ge=1, description="size of the part of a head's query and key without rotary embedding"
    )
    qk_rope_head_dim: int = Field(
        ge=2, multiple_of=2, description="size of the key with rotary embedding, for all heads"
    )
    v_head_dim: int = Field(ge=1, description="size of a head's value")
    index_n_heads: int = Field(
        0,
        ge=0,
        description="number of heads of the indexer; 0: no indexer, so every token attends to all tokens before it",
    )
    index_head_dim: int = Field(0, ge=0, description="size of a head of the indexer's queries and keys")
    index_topk: int = Field(
        0, ge=0, description="maximum number of tokens to which a token attends, if there is an indexer"
    )

    @model_validator(mode="after")
    def _index_is_whole(self) -> LatentAttention:
        if len({bool(self.index_n_heads), bool(self.index_head_dim), bool(self.index_topk)}) > 1:
            raise ValueError("index_n_heads, index_head_dim and index_topk must be given together; give all or none")
        if self.index_n_heads and not self.q_lora_rank:
            raise ValueError("an indexer needs q_lora_rank; set it")
        return self

    @property
    def kv_dim(self) -> int:
        """The number of elements that a token adds to the cache of a layer, on every device."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def index_bytes(self) -> int:
        """The bytes of a token in a layer's indexer cache: an fp8 key, and a 4-byte scale for each 128 elements."""
        return self.index_head_dim + 4 * -(-self.index_head_dim // 128)

    def cache_bytes(self, dtype_bytes: float, layers: int) -> float:
        """Return the bytes that a token adds to the caches of `layers` layers."""
        return layers * (self.kv_dim * dtype_bytes + self.index_bytes)

    @property
    def qk_head_dim(self) -> int:
        """The number of elements of a head's whole query, and of its expanded key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def shared_parameters(self, hidden_size: int) -> int:
        """Return the number of weights of a layer that every tensor-parallel device holds completely.

        They are the down projections with their norms, and the indexer.
        """
        index = self.index_n_heads * (self.q_lora_rank * self.index_head_dim + hidden_size)
        index += self.index_head_dim * (hidden_size + 2)
        return (hidden_size + 1) * self.q_lora_rank + hidden_size * self.kv_dim + self.kv_lora_rank + index

    def plain_parameters(self, hidden_size: int) -> int:
        """Return the number of weights of all layers that stay in 16 bits and that every device holds."""
        return 0

    def out_parameters(self, hidden_size: int, heads: int) -> int:
        """Return the number of weights of a layer's output projection, from the heads to the hidden state."""
        return heads * self.v_head_dim * hidden_size

    def of_layers(self, first: int, end: int) -> LatentAttention:
        """Return the attention of the layers `first` to `end - 1`."""
        return self

    def expansion_parameters(self, heads: int) -> int:
        """Return the number of weights that expand the latent vector into the keys and values of `heads` heads."""
        return self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)

    def parameters(self, hidden_size: int, heads: int) -> int:
        """Return the number of weights of one layer's attention, with its norms."""
        queries = (self.q_lora_rank or hidden_size) * heads * self.qk_head_dim
        shared = self.shared_parameters(hidden_size) + self.expansion_parameters(heads)
        return shared + queries + self.out_parameters(hidden_size, heads)


class CompressedAttention(LatentAttention):
    """DeepSeek-V4's attention: latent vectors of a window, and before the window one entry for every 4 or 128 tokens.

    Each layer keeps the latent vectors of the last `sliding_window` tokens. A latent vector is both key and value, for
    all heads; `kv_lora_rank` is the size of the part that is not rotated. The compression ratio of a layer says what
    else it keeps. Ratio 0: nothing. Ratio 4: one entry for every 4 tokens; an indexer chooses `index_topk` entries
    (compressed sparse attention). Ratio 128: one entry for every 128 tokens; tokens attend to all entries (heavily
    compressed attention). Sizes and layouts are those of `DeepseekV4Config` in transformers and of
    `vllm/models/deepseek_v4` in vLLM 0.33.
    """

    sliding_window: int = Field(ge=1, description="number of last tokens whose latent vectors are kept uncompressed")
    compress_ratios: tuple[int, ...] = Field(
        description="for each layer: number of tokens that it compresses into one entry; 0: only the window"
    )
    o_groups: int = Field(ge=1, description="number of groups of heads with separate output projections")
    o_lora_rank: int = Field(ge=1, description="rank of each group's output projection")

    @model_validator(mode="after")
    def _ratios_are_known(self) -> CompressedAttention:
        if not set(self.compress_ratios) <= {0, SPARSE, HEAVY}:
            raise ValueError(f"compress_ratios must be 0, {SPARSE} or {HEAVY}")
        return self

    def of_layers(self, first: int, end: int) -> CompressedAttention:
        """Return the attention of the layers `first` to `end - 1`; layers for drafting have only the window."""
        return self.model_copy(update={"compress_ratios": self.compress_ratios[first:end] or (0,) * (end - first)})

    def entry_bytes(self, dtype_bytes: float) -> float:
        """Return the bytes of a latent vector in a cache.

        In fp8 the rotated part stays in 16 bits. Each 64 elements of the rest have a scale; the scales are padded to
        8 bytes (fp8_ds_mla in vLLM).
        """
        return self.kv_dim * dtype_bytes if dtype_bytes > 1 else self.kv_lora_rank + 2 * self.qk_rope_head_dim + 8

    def cache_bytes(self, dtype_bytes: float, layers: int) -> float:
        """Return the bytes that a token permanently adds to the caches: its share of entries and of indexer keys."""
        entry = self.entry_bytes(dtype_bytes)
        return sum((entry + self._keys(ratio, self.index_bytes)) / ratio for ratio in self.compress_ratios if ratio)

    def request_bytes(self, dtype_bytes: float) -> float:
        """Return the bytes that a request has in the caches of all layers, whatever its length.

        They hold the window, and in float32 the keys and weights of the tokens that will form the next entry. An entry
        for 4 tokens also sees the tokens of the previous entry.
        """
        total = self.entry_bytes(dtype_bytes) * (self.sliding_window - 1 + _WINDOW_PAGE) * len(self.compress_ratios)
        for ratio in filter(None, self.compress_ratios):
            seen = self._overlap(ratio) * ratio - 1 + _STATE_PAGES[ratio]
            total += _FLOAT_BYTES * self.compressor_width(ratio) * seen
        return total

    def compressor_width(self, ratio: int) -> int:
        """Return the number of elements (keys and weights) that a token gives to a layer's compressors.

        This includes the compressor of the indexer.
        """
        return 2 * self._overlap(ratio) * (self.kv_dim + self._keys(ratio, self.index_head_dim)) if ratio else 0

    def shared_parameters(self, hidden_size: int) -> int:
        indexed = self.compress_ratios.count(SPARSE) / len(self.compress_ratios)  # share of layers with an indexer
        index = round(indexed * self.index_n_heads * self.index_head_dim * self.q_lora_rank)
        return (hidden_size + 1) * (self.q_lora_rank + self.kv_dim) + index

    def plain_parameters(self, hidden_size: int) -> int:
        weights = self.compress_ratios.count(SPARSE) * self.index_n_heads
        return hidden_size * (weights + sum(map(self.compressor_width, self.compress_ratios)))

    def expansion_parameters(self, heads: int) -> int:
        return 0

    def out_parameters(self, hidden_size: int, heads: int) -> int:
        return self.o_lora_rank * (heads * self.v_head_dim + self.o_groups * hidden_size)

    def _overlap(self, ratio: int) -> int:
        return 2 if ratio == SPARSE else 1

    def _keys(self, ratio: int, size: int) -> int:
        return size if ratio == SPARSE else 0


class LinearAttention(Settings):
    """Linear attention with a state of constant size: gated delta networks, as in Qwen3-Next and Qwen3.5.

    The source is Yang et al., arXiv:2412.06464. A short convolution runs over queries, keys and values. Then each value
    head has one matrix, which every token decays and corrects. A request keeps the last inputs of the convolution and
    these matrices, whose size does not depend on its length.
    """

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
        """The number of elements of the keys of all heads."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """The number of elements of the values of all heads."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """The number of channels of the convolution: queries, keys and values."""
        return 2 * self.key_dim + self.value_dim

    @property
    def conv_state(self) -> int:
        """The number of elements that the convolution keeps for a request."""
        return (self.linear_conv_kernel_dim - 1) * self.conv_dim

    @property
    def state(self) -> int:
        """The number of elements of a request's matrices."""
        return self.linear_key_head_dim * self.value_dim

    def parameters(self, hidden_size: int) -> int:
        """Return the number of weights of one layer's attention.

        They are the input projection, the convolution, decay and bias of each head, the norm, and the output
        projection.
        """
        into = hidden_size * (self.conv_dim + self.value_dim + 2 * self.linear_num_value_heads)
        own = self.linear_conv_kernel_dim * self.conv_dim + 2 * self.linear_num_value_heads
        return into + own + self.linear_value_head_dim + self.value_dim * hidden_size
