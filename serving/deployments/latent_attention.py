"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): one small latent vector stands for the KV of all heads.

Hidden states are projected down to a latent vector and one rotated key, which the cache keeps once for all heads.
Prompts expand the latent vector into keys and values of every head; decode rows take the expansion into their queries
and outputs instead, and attend over the latent vectors themselves. In DeepSeek-V3.2 (arXiv:2512.02556) and GLM-5 every
token attends to `index_topk` tokens only, which an indexer chooses by its own small keys.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from serving.settings import Settings


class LatentAttention(Settings):
    """The sizes of a latent attention, in elements, by the names that Hugging Face gives them."""

    q_lora_rank: int = Field(0, ge=0, description="rank of the queries' projection; 0: the projection is one matrix")
    kv_lora_rank: int = Field(ge=1, description="rank of the latent vector")
    qk_nope_head_dim: int = Field(ge=1, description="size of a head's query and key without rotation")
    qk_rope_head_dim: int = Field(ge=2, multiple_of=2, description="size of the rotated key that all heads share")
    v_head_dim: int = Field(ge=1, description="size of a head's value")
    index_n_heads: int = Field(
        0,
        ge=0,
        description="number of heads of the indexer; 0: no indexer, so every token attends to all tokens before it",
    )
    index_head_dim: int = Field(0, ge=0, description="size of a head of the indexer's queries and keys")
    index_topk: int = Field(0, ge=0, description="maximum number of tokens that one token attends to")

    @model_validator(mode="after")
    def _index_is_whole(self) -> LatentAttention:
        if len({bool(self.index_n_heads), bool(self.index_head_dim), bool(self.index_topk)}) > 1:
            raise ValueError("index_n_heads, index_head_dim and index_topk must be given together; give all or none")
        if self.index_n_heads and not self.q_lora_rank:
            raise ValueError("an indexer needs q_lora_rank; set it")
        return self

    @property
    def kv_dim(self) -> int:
        """The elements that a token leaves in the cache of a layer, on every device."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def index_bytes(self) -> int:
        """The bytes of a token in a layer's cache for the indexer: an fp8 key, and a 4-byte scale for 128 elements."""
        return self.index_head_dim + 4 * -(-self.index_head_dim // 128)

    def cache_bytes(self, dtype_bytes: float, layers: int) -> float:
        """Return the bytes that a token adds to the caches of `layers`."""
        return layers * (self.kv_dim * dtype_bytes + self.index_bytes)

    @property
    def qk_head_dim(self) -> int:
        """The elements of a head's whole query, and of its expanded key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def shared_parameters(self, hidden_size: int) -> int:
        """Return the weights of a layer that every tensor-parallel device has.

        They are the projections down with their norms, and the indexer.
        """
        index = self.index_n_heads * (self.q_lora_rank * self.index_head_dim + hidden_size)
        index += self.index_head_dim * (hidden_size + 2)
        return (hidden_size + 1) * self.q_lora_rank + hidden_size * self.kv_dim + self.kv_lora_rank + index

    def plain_parameters(self, hidden_size: int) -> int:
        """Return the weights of all layers that stay in 16 bits, on every device."""
        return 0

    def out_parameters(self, hidden_size: int, heads: int) -> int:
        """Return the weights of a layer that bring heads back to the hidden state."""
        return heads * self.v_head_dim * hidden_size

    def of_layers(self, first: int, end: int) -> LatentAttention:
        """Return the attention of the layers from `first` to before `end`."""
        return self

    def expansion_parameters(self, heads: int) -> int:
        """Return the weights that expand the latent vector into keys and values of `heads`."""
        return self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)

    def parameters(self, hidden_size: int, heads: int) -> int:
        """Return the weights of one layer's attention with its norms."""
        queries = (self.q_lora_rank or hidden_size) * heads * self.qk_head_dim
        shared = self.shared_parameters(hidden_size) + self.expansion_parameters(heads)
        return shared + queries + self.out_parameters(hidden_size, heads)
