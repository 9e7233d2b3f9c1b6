"""Multi-head latent attention as operations, the way vLLM runs it (`MLACommonImpl`).

For prompts, latent vectors are expanded into keys and values of every head, and attention is then as in other models.
Every chunk of a prompt expands the latent vectors of the tokens before it again. For decode rows, the expansion is
multiplied into the queries and outputs of each head instead, and attention is over the latent vectors. A latent vector
is key and value at once and the same for all heads, so every device reads all latent vectors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tokentwin.calibration.operations import (
    Amount,
    DecodeAttention,
    Elementwise,
    Gemm,
    Operation,
    PrefillAttention,
    StepSizes,
)
from tokentwin.serving.deployments.attention import LatentAttention
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.model_spec import ModelSpec
from tokentwin.serving.deployments.weight_types import DTYPE_BYTES, stored


@dataclass(frozen=True)
class HeadGemm(Gemm):
    """A batched GEMM: `[m, k] x [k, n]` for each of `heads` heads."""

    heads: int = 1

    @property
    def flops(self) -> Amount:
        return self.heads * super().flops

    @property
    def bytes(self) -> Amount:
        return self.heads * super().bytes


@dataclass(frozen=True)
class LatentPrefill(PrefillAttention):
    """Prompt attention over expanded keys (`head_dim`) and values (`value_dim`), in 16 bits for every KV cache type."""

    value_dim: int = 0

    @property
    def flops(self) -> Amount:
        return 2.0 * self.pairs * self.heads * (self.head_dim + self.value_dim)

    @property
    def bytes(self) -> Amount:
        return 2.0 * (self.past + 2.0 * self.tokens) * self.heads * (self.head_dim + self.value_dim)


@dataclass(frozen=True)
class LatentDecode(DecodeAttention):
    """Decode attention over latent vectors with rotated keys: `head_dim` elements, of which `value_dim` are values."""

    value_dim: int = 0

    @property
    def flops(self) -> Amount:
        return 2.0 * self.context * self.heads * (self.head_dim + self.value_dim) * self.queries

    @property
    def bytes(self) -> Amount:
        own = 2.0 * self.rows * self.queries * self.heads * (self.head_dim + self.value_dim)
        return DTYPE_BYTES[self.kv_dtype] * self.head_dim * self.context + own


@dataclass(frozen=True)
class SparsePrefill(LatentDecode):
    """Attention of `rows` prompt tokens over the latent vectors that an indexer chose, `context` vectors in total.

    The kernel reads at least `seen` latent vectors from memory.
    """

    seen: Amount = 0

    @property
    def bytes(self) -> Amount:
        own = 2.0 * self.rows * self.heads * (self.head_dim + self.value_dim)
        return DTYPE_BYTES[self.kv_dtype] * self.head_dim * self.seen + own


@dataclass(frozen=True)
class IndexScores:
    """An indexer's scores of `pairs` query-key pairs, and the choice of the highest scores; `seen` keys are read."""

    name: str
    tokens: Amount
    pairs: Amount
    seen: Amount
    heads: int
    head_dim: int
    key_bytes: int
    count: int = 1
    dtype: str = "fp8"

    @property
    def size(self) -> Amount:
        return self.tokens

    @property
    def flops(self) -> Amount:
        return 2.0 * self.pairs * self.heads * self.head_dim

    @property
    def bytes(self) -> Amount:
        """Bytes of keys and queries, and of scores in float32, which are written and read again."""
        return self.key_bytes * self.seen + self.tokens * (self.heads * self.head_dim) + 8.0 * self.pairs


@dataclass(frozen=True)
class DecodeIndexScores(IndexScores):
    """An indexer's scores of decode rows."""


def latent_projections(
    model: ModelSpec, latent: LatentAttention, heads: int, sizes: StepSizes, deployment: Deployment
) -> list[Operation]:
    """Return the projections of one device that has `heads` of the model's heads.

    The expansion matrices that decode rows use are in the deployment's `dtype`, even if other weights are quantised.
    """
    layers, hidden, tokens = model.kv_layers, model.hidden_size, sizes.tokens
    rank, kept = latent.q_lora_rank, latent.kv_dim
    queries = heads * latent.qk_head_dim

    def gemm(name: str, m: Amount, n: int, k: int, projection: str = "qkv") -> list[Operation]:
        return [
            Gemm(name + part.suffix, m, n, k, part.dtype, part.layers, part.width)
            for part in stored(model, deployment, projection, layers)
        ]

    operations = (
        gemm("latent down", tokens, rank + kept, hidden) + gemm("queries up", tokens, queries, rank)
        if rank
        else gemm("queries", tokens, queries, hidden) + gemm("latent down", tokens, kept, hidden)
    )
    operations += gemm("attention out", tokens, hidden, heads * latent.v_head_dim, "attention out")
    if latent.index_topk:
        index, plain = latent.index_n_heads * latent.index_head_dim, deployment.dtype
        operations += gemm("index queries", tokens, index, rank)
        operations.append(
            Gemm("index keys", tokens, latent.index_head_dim + latent.index_n_heads, hidden, plain, layers)
        )
    if np.any(sizes.prefill_tokens) and not latent.index_topk:
        expanded = heads * (latent.qk_nope_head_dim + latent.v_head_dim)
        seen = sizes.prefill_tokens + sizes.prefill_context
        operations += gemm("keys and values up", seen, expanded, latent.kv_lora_rank)
    absorbed = tokens if latent.index_topk else sizes.decode_rows + sizes.draft_tokens
    if np.any(absorbed):
        rows, lora, plain = absorbed, latent.kv_lora_rank, deployment.dtype
        operations += [
            HeadGemm("queries to latent", rows, lora, latent.qk_nope_head_dim, plain, layers, heads=heads),
            HeadGemm("latent to values", rows, latent.v_head_dim, lora, plain, layers, heads=heads),
        ]
    return operations


def latent_attention(
    latent: LatentAttention, heads: int, sizes: StepSizes, kv_dtype: str, layers: int, sharing: int = 1
) -> list[Operation]:
    """Return the attention operations of one device that has `heads` of the model's heads.

    Prompts attend over keys and values, and decode rows over the latent vectors. In models with an indexer prompts
    attend over latent vectors, too, as in vLLM, and every device computes the whole indexer. If `sharing` devices share
    the context of decode rows, each attends to its share with the heads of all.
    """
    if latent.index_topk:
        return _sparse_attention(latent, heads, sizes, kv_dtype, layers)
    operations: list[Operation] = []
    rows, head_dim = sizes.decode_rows, latent.qk_head_dim
    if np.any(sizes.prefill_tokens):
        prompts = (sizes.prefill_rows, sizes.prefill_tokens, sizes.prefill_context, sizes.prefill_pairs)
        expanded = LatentPrefill("prefill attention", *prompts, heads, heads, head_dim, kv_dtype, 0, layers)
        operations.append(replace(expanded, value_dim=latent.v_head_dim))
    if np.any(rows):
        queries, context = 1 + sizes.draft_tokens / np.maximum(rows, 1), sizes.decode_context + rows
        shape = (heads * sharing, 1, latent.kv_dim, kv_dtype, 0, layers, queries)
        absorbed = LatentDecode("decode attention", rows, context / sharing, *shape)
        operations.append(replace(absorbed, value_dim=latent.kv_lora_rank))
    return operations


def _sparse_attention(
    latent: LatentAttention, heads: int, sizes: StepSizes, kv_dtype: str, layers: int
) -> list[Operation]:
    index = (latent.index_n_heads, latent.index_head_dim, latent.index_bytes, layers)
    topk, value_dim = float(latent.index_topk), latent.kv_lora_rank
    operations: list[Operation] = []
    if np.any(sizes.prefill_tokens):
        tokens, pairs = sizes.prefill_tokens, sizes.prefill_pairs
        seen, chosen = tokens + sizes.prefill_context, np.minimum(pairs, tokens * topk)
        operations.append(IndexScores("prefill index", tokens, pairs, seen, *index))
        sparse = SparsePrefill("prefill attention", tokens, chosen, heads, 1, latent.kv_dim, kv_dtype, 0, layers)
        operations.append(replace(sparse, value_dim=value_dim, seen=seen))
    if np.any(sizes.decode_rows):
        rows = sizes.decode_rows
        queries, context = 1 + sizes.draft_tokens / np.maximum(rows, 1), sizes.decode_context + rows
        operations.append(DecodeIndexScores("decode index", rows * queries, context * queries, context, *index))
        shape = (heads, 1, latent.kv_dim, kv_dtype, 0, layers, queries)
        absorbed = LatentDecode("decode attention", rows, np.minimum(context, rows * topk), *shape)
        operations.append(replace(absorbed, value_dim=value_dim))
    return operations


def latent_elementwise(latent: LatentAttention, heads: int, tokens: Amount, layers: int) -> list[Operation]:
    """Return the elementwise operations: norms of down-projections, rotary embedding of queries and key, KV write."""
    down = latent.q_lora_rank + latent.kv_lora_rank
    rotated = heads * latent.qk_rope_head_dim + latent.kv_dim
    rotated += (latent.index_n_heads + 1) * latent.index_head_dim
    return [
        Elementwise("latent norms", tokens * (4.0 * down), launches=2 if latent.q_lora_rank else 1, count=layers),
        Elementwise("rotary, KV write", tokens * (4.0 * rotated), count=layers),
    ]
