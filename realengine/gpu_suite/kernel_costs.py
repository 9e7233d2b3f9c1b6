"""What the operations of a layer must move and compute, by their definitions: each input read once, each output written
once, and two operations for a multiply-add of a matrix product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from realengine.gpu_suite.expert_batch import Mixture
from realengine.gpu_suite.packing import Packing
from realengine.gpu_suite.ragged_batch import Row
from serving.deployments.model_spec import ModelSpec


class Cost(NamedTuple):
    """What an operation must move and compute, by its definition."""

    bytes: int
    flops: int = 0


def gemm_cost(tokens: int, inputs: int, outputs: int, weight_bytes: int = 2) -> Cost:
    """bf16 activations; weights of `weight_bytes` each, with a float32 scale for each output if that is 1."""
    weights = inputs * outputs * weight_bytes + (4 * outputs if weight_bytes == 1 else 0)
    return Cost(weights + 2 * tokens * (inputs + outputs), 2 * tokens * inputs * outputs)


def packed_cost(tokens: int, packing: Packing) -> Cost:
    """bf16 activations; packed integers, and for each group a bf16 scale and a zero point of a byte, if it has one."""
    groups = packing.outputs * -(-packing.inputs // (packing.group or packing.inputs))
    weights = packing.inputs * packing.outputs * packing.bits // 8 + (3 if packing.zeros else 2) * groups
    return Cost(
        weights + 2 * tokens * (packing.inputs + packing.outputs), 2 * tokens * packing.inputs * packing.outputs
    )


def experts_cost(tokens: int, mixture: Mixture) -> Cost:
    """bf16: tokens in and out, and weights of the experts that are chosen, on average over choices drawn evenly. All
    experts are this rank's."""
    hidden, inner, experts, topk, _ = mixture
    touched = experts * (1 - (1 - topk / experts) ** tokens)
    each = 3 * hidden * inner
    return Cost(round(2 * touched * each) + 2 * 2 * tokens * hidden, 2 * tokens * topk * each)


def attention_cost(rows: Sequence[Row], heads: int, kv_heads: int, dim: int, kv_bytes: int = 2) -> Cost:
    """bf16, causal: of a row with past c and n tokens, n * (2c + n + 1) / 2 query-key pairs, each a product with a key
    and one with a value. Block ids are not counted."""
    tokens = sum(count for _, count in rows)
    pairs = sum(count * (2 * context - count + 1) // 2 for context, count in rows)
    cached = 2 * sum(context for context, _ in rows) * kv_heads * dim * kv_bytes
    return Cost(cached + 2 * 2 * tokens * heads * dim, 4 * pairs * heads * dim)


def add_rms_norm_cost(tokens: int, hidden: int) -> Cost:
    """bf16: the input, the residual in and out, the output, the weight."""
    return Cost(2 * hidden * (4 * tokens + 1))


def silu_mul_cost(tokens: int, size: int) -> Cost:
    """bf16: gate and up, and their product."""
    return Cost(2 * 3 * tokens * size)


def rope_store_cost(tokens: int, spec: ModelSpec) -> Cost:
    """bf16: the QKV in and as much out; of each token an angle's float32 cosines and sines, position and slot."""
    merged = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    norms = 2 * 2 * spec.head_dim if spec.qk_norm else 0
    return Cost(tokens * (2 * 2 * merged + 4 * spec.head_dim + 8) + norms)


def sample_cost(rows: int, vocab: int, draws: bool) -> Cost:
    """bf16 logits, a token for each row, and what a draw asks for."""
    return Cost(rows * (2 * vocab + 4 + (16 if draws else 0)))
