"""A step as a list of operations: what is computed, how many FLOPs and bytes that takes at the least.

Derived from the model, the deployment and the sizes of a step, for *one* device of a tensor-parallel group. Every
size may be a number or a numpy array of the same shape, so that the same lines price one step and tabulate ten
thousand. `count` says how often an operation occurs in a step: once a layer, for most. FLOPs and bytes are of one
occurrence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from calibration.expert_routing import busiest_over_mean, experts_touched
from serving.deployments.config import Deployment
from serving.deployments.dtypes import DTYPE_BYTES
from serving.deployments.kv_bytes import kv_dtype
from serving.deployments.model_spec import ModelSpec
from serving.deployments.weight_types import check_experts, linear_dtype, weight_width, weights_dtype
from serving.errors import UserError

_WEIGHT_ONLY = ("int4", "int8")
Amount = Any  # float | int | NDArray: one step, or many at once


class Operation(Protocol):
    """One kind of kernel in a step.

    name    which one, unique in a step: `qkv`, `decode attention`, ...
    count   occurrences in a step
    size    what flows through it (tokens, rows, elements, ...): where it is 0, the operation does not occur
    flops, bytes    of one occurrence, on one device
    """

    @property
    def name(self) -> str: ...
    @property
    def count(self) -> int: ...
    @property
    def size(self) -> Amount: ...
    @property
    def flops(self) -> Amount: ...
    @property
    def bytes(self) -> Amount: ...


@dataclass(frozen=True)
class Gemm:
    """`[m, k] x [k, n]`: activations by weights, both of `dtype`; accumulated and written in 16 bits.

    Weights in int4 and int8 meet activations in 16 bits.

    width   bytes of a weight with its share of scales; 0: what `dtype` takes
    """

    name: str
    m: Amount
    n: int
    k: int
    dtype: str = "bfloat16"
    count: int = 1
    width: float = 0.0

    @property
    def size(self) -> Amount:
        return self.m

    @property
    def flops(self) -> Amount:
        return 2.0 * self.m * self.n * self.k

    @property
    def bytes(self) -> Amount:
        width = self.width or DTYPE_BYTES[self.dtype]
        activation = 2.0 if self.dtype in _WEIGHT_ONLY else max(width, 1.0)
        return width * self.n * self.k + self.m * (activation * self.k + 2.0 * self.n)


@dataclass(frozen=True)
class PrefillAttention:
    """Causal attention of `tokens` query tokens in `rows` prompts over `past` KV tokens and themselves.

    pairs   query-key pairs: sum over rows of n (2c + n + 1) / 2
    window  tokens that a query sees at most; 0 is all of them (`pairs` is then already clipped by the caller)
    """

    name: str
    rows: Amount
    tokens: Amount
    past: Amount
    pairs: Amount
    heads: int
    kv_heads: int
    head_dim: int
    kv_dtype: str = "bfloat16"
    window: int = 0
    count: int = 1

    @property
    def size(self) -> Amount:
        return self.tokens

    @property
    def flops(self) -> Amount:
        return 4.0 * self.pairs * self.heads * self.head_dim

    @property
    def bytes(self) -> Amount:
        kv = 2.0 * DTYPE_BYTES[self.kv_dtype] * self.kv_heads * self.head_dim
        return kv * (self.past + self.tokens) + 4.0 * self.tokens * self.heads * self.head_dim


@dataclass(frozen=True)
class DecodeAttention:
    """One query token for each of `rows`, or `queries`, over `context` KV tokens in all (its own included)."""

    name: str
    rows: Amount
    context: Amount
    heads: int
    kv_heads: int
    head_dim: int
    kv_dtype: str = "bfloat16"
    window: int = 0
    count: int = 1
    queries: Amount = 1

    @property
    def size(self) -> Amount:
        return self.rows

    @property
    def flops(self) -> Amount:
        return 4.0 * self.context * self.heads * self.head_dim * self.queries

    @property
    def bytes(self) -> Amount:
        kv = 2.0 * DTYPE_BYTES[self.kv_dtype] * self.kv_heads * self.head_dim
        return kv * self.context + 4.0 * self.rows * self.queries * self.heads * self.head_dim


@dataclass(frozen=True)
class Experts:
    """The routed experts of a mixture: gate, up and down GEMMs over `tokens x topk` rows, `experts / ep` a device."""

    name: str
    tokens: Amount
    hidden: int
    inter: int
    topk: int
    experts: int
    tp: int = 1
    ep: int = 1
    dtype: str = "bfloat16"
    count: int = 1
    width: float = 0.0  # as of a `Gemm`

    @property
    def size(self) -> Amount:
        return self.tokens

    @property
    def touched(self) -> Amount:
        """Experts of this device that get a token, on average, when tokens choose evenly and independently."""
        return experts_touched(self.experts, self.topk, self.tokens) / self.ep

    @property
    def flops(self) -> Amount:
        return 6.0 * self.tokens * self.topk / self.ep * self.hidden * self.inter / self.tp

    @property
    def bytes(self) -> Amount:
        weights = 3.0 * (self.width or DTYPE_BYTES[self.dtype]) * self.hidden * self.inter / self.tp * self.touched
        return weights + self.tokens * self.topk / self.ep * (4.0 * self.hidden + 6.0 * self.inter / self.tp)


@dataclass(frozen=True)
class Elementwise:
    """Norms, rotary embedding, activations, sampling: `moved` bytes read and written by `launches` kernels."""

    name: str
    moved: Amount
    launches: int = 1
    count: int = 1

    @property
    def size(self) -> Amount:
        return self.moved

    @property
    def flops(self) -> Amount:
        return 0.0 * self.moved

    @property
    def bytes(self) -> Amount:
        return self.moved


@dataclass(frozen=True)
class Collective:
    """A collective over `gpus` devices. `elements` is the message of one device, of 16-bit elements.

    kind    all_reduce, all_gather, reduce_scatter, all_to_all; p2p: from one device to another
    """

    name: str
    kind: str
    gpus: int
    elements: Amount
    count: int = 1

    @property
    def size(self) -> Amount:
        return self.elements

    @property
    def flops(self) -> Amount:
        return 0.0 * self.elements

    @property
    def bytes(self) -> Amount:
        """Bytes that a device sends over its links, by the ring algorithm."""
        share = 1.0 if self.kind == "p2p" else (self.gpus - 1) / self.gpus
        return 2.0 * self.elements * share * (2.0 if self.kind == "all_reduce" else 1.0)


@dataclass(frozen=True)
class StepSizes:
    """What a step holds, as `StepPlan` counts it; every field a number or an array.

    decode_spread   standard deviation of the decode rows' contexts
    draft_tokens    draft tokens that decode rows verify beside their own
    """

    prefill_rows: Amount = 0
    prefill_tokens: Amount = 0
    prefill_context: Amount = 0
    prefill_pairs: Amount = 0
    decode_rows: Amount = 0
    decode_context: Amount = 0
    decode_spread: Amount = 0
    sampled_rows: Amount = 0
    draft_tokens: Amount = 0

    @property
    def tokens(self) -> Amount:
        """Tokens that go through the layers."""
        return self.prefill_tokens + self.decode_rows + self.draft_tokens


def uniform_step(rows: int, context: int, prompts: int, chunk: int, past: int, drafts: int = 0) -> StepSizes:
    """`rows` decode rows after `context` tokens each, and `prompts` chunks of `chunk` tokens over `past` each.

    Every decode row has `drafts` draft tokens to verify.
    """
    return StepSizes(
        prefill_rows=prompts,
        prefill_tokens=prompts * chunk,
        prefill_context=prompts * past,
        prefill_pairs=prompts * (chunk * past + chunk * (chunk + 1) // 2),
        decode_rows=rows,
        decode_context=rows * context,
        sampled_rows=rows + prompts,
        draft_tokens=rows * drafts,
    )


def step_operations(model: ModelSpec, deployment: Deployment, sizes: StepSizes) -> list[Operation]:
    """The operations of one step on one device, or on one of each pipeline stage: a step's way through all layers.

    `decode_context` counts tokens before the step, as a plan does.
    """
    tp, tokens, logits = deployment.tensor_parallel_size, sizes.tokens, sizes.sampled_rows
    if deployment.scheduler.speculative is not None:  # a draft model takes the logits of each row's last token only
        logits = logits + sizes.draft_tokens
    return [
        *_layer_gemms(model, deployment, tokens),
        *_attention(model, deployment, sizes),
        *_mixture(model, deployment, tokens),
        *_between(model, tp, tokens),
        *_head(model, tp, logits),
        *_collectives(model, deployment, tokens, logits),
        *stage_transfers(model, deployment, tokens),
    ]


def stage_transfers(model: ModelSpec, deployment: Deployment, tokens: Amount) -> list[Operation]:
    """What brings a step's activations to the next pipeline stage: hidden states and residuals.

    As in vLLM, each device of a tensor-parallel group sends its share to its counterpart, and the receivers gather.
    """
    tp, hops = deployment.tensor_parallel_size, deployment.pipeline_parallel_size - 1
    if not hops:
        return []
    elements = tokens * (2.0 * model.hidden_size)
    transfers: list[Operation] = [Collective("send to stage", "p2p", 2, elements / tp, hops)]
    if tp > 1:
        transfers.append(Collective("gather on stage", "all_gather", tp, elements, hops))
    return transfers


def heads_per_device(model: ModelSpec, tp: int) -> tuple[int, int]:
    """Query and KV heads of one device; KV heads are repeated when there are fewer than devices."""
    return -(-model.num_heads // tp), max(model.num_kv_heads // tp, 1)


def _layer_gemms(model: ModelSpec, deployment: Deployment, tokens: Amount) -> list[Operation]:
    tp, layers, hidden = deployment.tensor_parallel_size, model.num_layers, model.hidden_size
    heads, kv_heads = heads_per_device(model, tp)
    dtype = linear_dtype(model, deployment)
    width = weight_width(dtype, model, deployment)
    gemms: list[Operation] = [
        Gemm("qkv", tokens, (heads + 2 * kv_heads) * model.head_dim, hidden, dtype, layers, width),
        Gemm("attention out", tokens, hidden, heads * model.head_dim, dtype, layers, width),
    ]
    if dense := layers - model.moe_layers:
        gemms += _mlp("", tokens, hidden, -(-model.intermediate_size // tp), dtype, dense, width)
    return gemms


def _mlp(which: str, tokens: Amount, hidden: int, inter: int, dtype: str, layers: int, width: float) -> list[Operation]:
    return [
        Gemm(f"{which}gate and up", tokens, 2 * inter, hidden, dtype, layers, width),
        Gemm(f"{which}down", tokens, hidden, inter, dtype, layers, width),
    ]


def _attention(model: ModelSpec, deployment: Deployment, sizes: StepSizes) -> list[Operation]:
    heads, kv_heads = heads_per_device(model, deployment.tensor_parallel_size)
    kv = kv_dtype(deployment)
    operations: list[Operation] = []
    for suffix, window, layers in (
        ("", 0, model.num_layers - model.sliding_layers),
        (" (window)", model.sliding_window, model.sliding_layers),
    ):
        if not layers:
            continue
        shape = (heads, kv_heads, model.head_dim, kv, window, layers)
        rows, drafted = sizes.decode_rows, sizes.draft_tokens
        if np.any(sizes.prefill_tokens):
            past, pairs = _seen_by_prompts(sizes, window)
            prompts, tokens = sizes.prefill_rows, sizes.prefill_tokens
            operations.append(PrefillAttention(f"prefill attention{suffix}", prompts, tokens, past, pairs, *shape))
        if np.any(rows):
            context = sizes.decode_context + rows
            if window:
                context = np.minimum(context, rows * window)
            queries = 1 + drafted / np.maximum(rows, 1)
            operations.append(DecodeAttention(f"decode attention{suffix}", rows, context, *shape, queries))
    return operations


def own_pairs(rows: Amount, tokens: Amount, past: Amount, pairs: Amount) -> Amount:
    """Of the query-key pairs of some prompts, those within their own chunks.

    Pasts are taken to be alike; whatever the prompts are, pairs lie between those of equal chunks and of a single one.
    """
    least = tokens * (tokens / np.maximum(rows, 1) + 1) / 2
    return np.clip(pairs - tokens * (past / np.maximum(rows, 1)), least, tokens * (tokens + 1) / 2)


def _seen_by_prompts(sizes: StepSizes, window: int) -> tuple[Amount, Amount]:
    """Past KV tokens and query-key pairs of the prompts, when a query sees at most `window` tokens (0: all)."""
    if not window:
        return sizes.prefill_context, sizes.prefill_pairs
    past = np.minimum(sizes.prefill_context, sizes.prefill_rows * window)
    return past, np.minimum(sizes.prefill_pairs, sizes.prefill_tokens * float(window))


def _mixture(model: ModelSpec, deployment: Deployment, tokens: Amount) -> list[Operation]:
    if not model.num_experts and deployment.expert_imbalance != 1.0:
        remedy = f"cannot be set, because {model.name} has no experts; leave it out"
        raise UserError("expert_imbalance", deployment.expert_imbalance, remedy)
    check_experts(model, deployment)
    layers, hidden, dtype = model.moe_layers, model.hidden_size, weights_dtype(model, deployment)
    if not layers:
        return []
    tp, ranks = deployment.tensor_parallel_size, deployment.data_parallel_size
    routed = tokens * ranks  # the ranks of a data-parallel group step together and share their experts
    busiest = routed * busiest_over_mean(model, deployment, routed)  # which the others wait for
    shape = (hidden, model.moe_intermediate_size, model.experts_per_token, model.num_experts)
    split = (1, tp * ranks) if deployment.enable_expert_parallel else (tp * ranks, 1)
    operations: list[Operation] = [
        Gemm("router", tokens, model.num_experts, hidden, deployment.dtype, layers),
        Experts("experts", busiest, *shape, *split, dtype, layers, weight_width(dtype, model, deployment)),
    ]
    if shared := -(-model.shared_intermediate_size // tp):
        linear = linear_dtype(model, deployment)
        operations += _mlp("shared ", tokens, hidden, shared, linear, layers, weight_width(linear, model, deployment))
    return operations


def _between(model: ModelSpec, tp: int, tokens: Amount) -> list[Operation]:
    """Norms, rotary embedding with the KV write, and the activation: bytes of 16-bit activations."""
    heads, kv_heads = heads_per_device(model, tp)
    operations: list[Operation] = [
        Elementwise("norms", tokens * (8.0 * model.hidden_size), count=2 * model.num_layers),
        Elementwise(
            "rotary, KV write", tokens * (4.0 * (heads + 2 * kv_heads) * model.head_dim), count=model.num_layers
        ),
    ]
    if dense := model.num_layers - model.moe_layers:
        operations.append(Elementwise("activation", tokens * (6.0 * (model.intermediate_size // tp)), count=dense))
    return operations


def _head(model: ModelSpec, tp: int, sampled: Amount) -> list[Operation]:
    vocabulary = -(-model.vocab_size // tp)
    return [
        Gemm("head", sampled, vocabulary, model.hidden_size),
        Elementwise("sampler", sampled * (8.0 * model.vocab_size), launches=4),
    ]


def _collectives(model: ModelSpec, deployment: Deployment, tokens: Amount, sampled: Amount) -> list[Operation]:
    tp, ranks, layers = deployment.tensor_parallel_size, deployment.data_parallel_size, model.num_layers
    operations: list[Operation] = []
    if tp > 1:
        operations.append(Collective("all-reduce", "all_reduce", tp, tokens * float(model.hidden_size), 2 * layers))
        operations.append(Collective("gather logits", "all_gather", tp, sampled * float(model.vocab_size), 1))
    if ranks > 1 and model.num_experts:
        message = tokens * ranks * float(model.hidden_size)
        operations.append(Collective("dispatch", "all_gather", ranks, message, model.moe_layers))
        operations.append(Collective("combine", "reduce_scatter", ranks, message, model.moe_layers))
    return operations
