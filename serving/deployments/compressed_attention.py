"""DeepSeek-V4's attention: latent vectors of a window, and before it one entry for every 4 or 128 tokens.

Each layer keeps the latent vectors of the last `sliding_window` tokens, which are key and value at once and the same
for all heads. By its ratio a layer keeps nothing else (0), one entry for 4 tokens of which an indexer chooses
`index_topk` (compressed sparse attention), or one entry for 128 tokens, all of which it attends to (heavily compressed
attention). Sizes and layouts are those of transformers' `DeepseekV4Config` and of vLLM 0.33's
`vllm/models/deepseek_v4`.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from serving.deployments.latent_attention import LatentAttention

SPARSE, HEAVY = 4, 128  # tokens of an entry
BLOCK_SIZE = 256  # tokens of a KV block of vLLM's: a whole number of entries of either kind
_WINDOW_PAGE = 64  # tokens of a page of the window, which can begin in the middle of a page
_STATE_PAGES = {SPARSE: 4, HEAVY: 8}  # tokens of a page of tokens that are not in an entry yet
_FLOAT_BYTES = 4


class CompressedAttention(LatentAttention):
    """Attention whose keys and values are whole latent vectors; `kv_lora_rank` is the part that is not rotated."""

    sliding_window: int = Field(ge=1, description="number of last tokens whose own latent vectors a query sees")
    compress_ratios: tuple[int, ...] = Field(
        description="number of tokens that each layer compresses into one entry; 0: the layer has the window only"
    )
    o_groups: int = Field(ge=1, description="number of groups of heads that are projected down separately")
    o_lora_rank: int = Field(ge=1, description="rank of each group's projection")

    @model_validator(mode="after")
    def _ratios_are_known(self) -> CompressedAttention:
        if not set(self.compress_ratios) <= {0, SPARSE, HEAVY}:
            raise ValueError(f"compress_ratios must be 0, {SPARSE} or {HEAVY}")
        return self

    def of_layers(self, first: int, end: int) -> CompressedAttention:
        """Return the attention of the layers from `first` to before `end`; layers for drafting have the window only."""
        return self.model_copy(update={"compress_ratios": self.compress_ratios[first:end] or (0,) * (end - first)})

    def entry_bytes(self, dtype_bytes: float) -> float:
        """Return the bytes of a latent vector in a cache.

        In fp8 the rotated part stays in 16 bits, with a scale for each 64 of the rest, padded to 8 bytes (vLLM's
        fp8_ds_mla).
        """
        return self.kv_dim * dtype_bytes if dtype_bytes > 1 else self.kv_lora_rank + 2 * self.qk_rope_head_dim + 8

    def cache_bytes(self, dtype_bytes: float, layers: int) -> float:
        """Return the bytes that a token adds to the caches of `layers` for good: parts of entries and indexer keys."""
        entry = self.entry_bytes(dtype_bytes)
        return sum((entry + self._keys(ratio, self.index_bytes)) / ratio for ratio in self.compress_ratios if ratio)

    def request_bytes(self, dtype_bytes: float) -> float:
        """Return the bytes that a request has in the caches of all layers, however long it is.

        They are the window, and in float32 keys and weights of the tokens that the next entry is made of. Entries for 4
        tokens see the tokens of the last entry, too.
        """
        total = self.entry_bytes(dtype_bytes) * (self.sliding_window - 1 + _WINDOW_PAGE) * len(self.compress_ratios)
        for ratio in filter(None, self.compress_ratios):
            seen = self._overlap(ratio) * ratio - 1 + _STATE_PAGES[ratio]
            total += _FLOAT_BYTES * self.compressor_width(ratio) * seen
        return total

    def compressor_width(self, ratio: int) -> int:
        """Return the keys and weights that a token gives the compressors of a layer, the indexer's among them."""
        return 2 * self._overlap(ratio) * (self.kv_dim + self._keys(ratio, self.index_head_dim)) if ratio else 0

    def shared_parameters(self, hidden_size: int) -> int:
        indexed = self.compress_ratios.count(SPARSE) / len(self.compress_ratios)  # share of the layers
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
