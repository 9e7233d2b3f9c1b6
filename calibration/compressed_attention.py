"""DeepSeek-V4's attention and residual streams as operations, the way vLLM runs them (`vllm/models/deepseek_v4`).

Every query attends over latent vectors, which are key and value at once. A query sees the vectors of the tokens in its
window, and compressed entries, each of which stands for 4 or 128 tokens. FlashMLA pads the number of heads of a device
to 64 or 128. The compressors and the indexer are in no kernel table with a fit. Their work is counted in bytes, and
their times are marked as extrapolated.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from tokentwin.calibration.latent_attention import (
    DecodeIndexScores,
    HeadGemm,
    IndexScores,
    LatentDecode,
    SparsePrefill,
)
from tokentwin.calibration.operations import Amount, Elementwise, Gemm, Operation, StepSizes
from tokentwin.serving.deployments.attention import SPARSE, CompressedAttention
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.model_spec import ModelSpec
from tokentwin.serving.deployments.weight_types import stored
from tokentwin.traces.metrics.step_metrics import attended_pairs

_PADDED_HEADS = 64  # FlashMLA pads the number of heads to this number or to twice as many


def compressed_projections(
    model: ModelSpec, latent: CompressedAttention, heads: int, tokens: Amount, deployment: Deployment
) -> list[Operation]:
    """Return the projections of one device that has `heads` of the model's heads.

    Attention outputs are projected down in groups. The device's share of these groups is its share of the heads.
    """
    hidden, layers = model.hidden_size, model.num_layers
    groups = -(-latent.o_groups * heads // model.num_heads)
    sparse = latent.compress_ratios.count(SPARSE)

    def gemm(name: str, n: int, k: int, projection: str = "qkv", count: int = layers, batch: int = 0) -> list[Gemm]:
        operations = []
        for part in stored(model, deployment, projection, count):
            one = Gemm(name + part.suffix, tokens, n, k, part.dtype, part.layers, part.width)
            operations.append(HeadGemm(**vars(one), heads=batch) if batch else one)
        return operations

    down = latent.o_lora_rank
    operations: list[Operation] = [
        *gemm("latent down", latent.q_lora_rank + latent.kv_dim, hidden),
        *gemm("queries up", heads * latent.qk_head_dim, latent.q_lora_rank),
        *gemm("values down", down, heads * latent.v_head_dim // groups, "attention out", batch=groups),
        *gemm("attention out", hidden, groups * down, "attention out"),
    ]
    if sparse:
        width = latent.index_n_heads * latent.index_head_dim
        operations += gemm("index queries", width, latent.q_lora_rank, count=sparse)
    for ratio, count in _kinds(latent):
        if ratio:
            width = latent.compressor_width(ratio) + (latent.index_n_heads if ratio == SPARSE else 0)
            operations.append(Gemm(f"compressor (1 for {ratio})", tokens, width, hidden, deployment.dtype, count))
    return operations


def compressed_attention(latent: CompressedAttention, heads: int, sizes: StepSizes, kv_dtype: str) -> list[Operation]:
    """Return the attention operations of one device with `heads` heads. Every device computes the whole indexer."""
    padded = _PADDED_HEADS * (1 if heads <= _PADDED_HEADS else 2)
    rows, tokens, past = sizes.decode_rows, sizes.prefill_tokens, sizes.prefill_context
    queries = rows + sizes.draft_tokens
    context = sizes.decode_context + rows
    queries_of_row = queries / np.maximum(rows, 1)
    operations: list[Operation] = []
    for ratio, count in _kinds(latent):
        suffix = f" (1 for {ratio})" if ratio else " (window)"
        scale, indexed = ratio or np.inf, ratio == SPARSE
        index = (latent.index_n_heads, latent.index_head_dim, latent.index_bytes, count)
        if np.any(tokens):
            pairs, seen = sizes.prefill_pairs, (tokens + past) / scale
            if indexed:
                operations.append(IndexScores("prefill index", tokens, pairs / scale, seen, *index))
            seen = seen + tokens + np.minimum(past, sizes.prefill_rows * float(latent.sliding_window))
            chosen = attended_pairs(latent, ratio, pairs, tokens)
            shape = (padded, 1, latent.kv_dim, kv_dtype, 0, count)
            prompts = SparsePrefill(f"prefill attention{suffix}", tokens, chosen, *shape)
            operations.append(replace(prompts, value_dim=latent.v_head_dim, seen=seen))
        if np.any(rows):
            if indexed:
                operations.append(
                    DecodeIndexScores(
                        "decode index", queries, context * queries_of_row / scale, context / scale, *index
                    )
                )
            chosen = attended_pairs(latent, ratio, context, rows)
            decode = LatentDecode(
                f"decode attention{suffix}", rows, chosen, padded, 1, latent.kv_dim, kv_dtype, 0, count, queries_of_row
            )
            operations.append(replace(decode, value_dim=latent.v_head_dim))
    return operations


def compressed_elementwise(
    latent: CompressedAttention, heads: int, hidden_size: int, streams: int, tokens: Amount, layers: int
) -> list[Operation]:
    """Return the elementwise operations: norms, rotary embeddings, compressor states and mixing of residual streams.

    Before attention and before the MLP all streams are read twice: once to compute the weights that mix them, and once
    to add them up. Afterwards they are read once more and written.
    """
    own = 4.0 * (latent.q_lora_rank + latent.kv_dim)
    rotated = 4.0 * (heads * latent.qk_head_dim + latent.kv_dim)
    turned_back = 3.0 * heads * latent.v_head_dim  # outputs that are rotated back and quantised
    operations: list[Operation] = [
        Elementwise("latent norms", tokens * own, count=layers),
        Elementwise("rotary, KV write", tokens * (rotated + turned_back), launches=2, count=layers),
    ]
    for ratio, count in _kinds(latent):
        if ratio:  # a token's part is written in float32, and read again to make its compressed entry
            moved, launches = 8.0 * latent.compressor_width(ratio), 2
            if ratio == SPARSE:
                moved, launches = moved + 3.0 * latent.index_n_heads * latent.index_head_dim, 5
            operations.append(Elementwise(f"entries (1 for {ratio})", tokens * moved, launches, count))
    if streams > 1:
        mixed = tokens * (2.0 * (4 * streams + 2) * hidden_size) + 4.0 * (2 + streams) * streams**2 * hidden_size
        operations.append(Elementwise("residual streams", mixed, launches=3, count=2 * layers))
    return operations


def _kinds(latent: CompressedAttention) -> list[tuple[int, int]]:
    """Return each compression ratio with the number of layers that have it."""
    return sorted(Counter(latent.compress_ratios).items())
