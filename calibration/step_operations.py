"""A step as a list of operations, derived from the model, the deployment and the sizes of the step.

The operations are those of *one* device of a tensor-parallel group, for all layers.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tokentwin.calibration.compressed_attention import (
    compressed_attention,
    compressed_elementwise,
    compressed_projections,
)
from tokentwin.calibration.context_parallel import context_exchanges, share_of_step
from tokentwin.calibration.expert_routing import busiest_over_mean
from tokentwin.calibration.latent_attention import latent_attention, latent_elementwise, latent_projections
from tokentwin.calibration.linear_attention import linear_attention
from tokentwin.calibration.operations import (
    Amount,
    Collective,
    DecodeAttention,
    Elementwise,
    Exchange,
    Experts,
    Gemm,
    Operation,
    PrefillAttention,
    Scores,
    StepSizes,
)
from tokentwin.serving.deployments.attention import CompressedAttention
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.inter_node import (
    Group,
    context_group,
    data_group,
    expert_group,
    hops_between_nodes,
    inter_node,
    tensor_group,
)
from tokentwin.serving.deployments.kv_layout import kv_dtype
from tokentwin.serving.deployments.model_spec import ModelSpec
from tokentwin.serving.deployments.weight_types import check_format, check_linear_heads, stored
from tokentwin.serving.errors import UserError


def step_operations(model: ModelSpec, deployment: Deployment, sizes: StepSizes) -> list[Operation]:
    """Return the operations of a step on one device, or on one device of each pipeline stage, in all layers.

    `sizes.decode_context` counts the tokens before the step, as in a plan.
    """
    tp, whole, logits = deployment.tensor_parallel_size, sizes, sizes.sampled_rows
    if deployment.scheduler.speculative is not None:  # a draft model needs the last token's logits only
        logits = logits + sizes.draft_tokens
    sizes = share_of_step(deployment, sizes)
    tokens = sizes.tokens
    return [
        *_projections(model, deployment, sizes),
        *_attention(model, deployment, sizes),
        *context_exchanges(model, deployment, whole, *heads_per_device(model, tp)),
        *_mixture(model, deployment, tokens),
        *_between(model, deployment, tokens),
        *_head(model, tp, logits),
        *_collectives(model, deployment, tokens, logits),
        *_stage_transfers(model, deployment, tokens),
    ]


def stage_transfer(model: ModelSpec, deployment: Deployment, tokens: Amount, across: bool) -> list[Collective]:
    """Return the transfer of a step's activations to the next pipeline stage; `across` is True between nodes.

    The activations are hidden states and residuals, or all residual streams. As in vLLM, each device of a
    tensor-parallel group sends its share to its counterpart, and the receivers gather the shares.
    """
    group, carried = tensor_group(deployment), max(model.residual_streams, 2.0)
    elements = tokens * (carried * model.hidden_size)
    way = Group(2, 2, inter_node(deployment).of_a_device) if across else Group(2, 1, None)
    transfer = [_collective("send to stage", "p2p", way, elements / group.gpus, 1)]
    if group.gpus > 1:
        transfer.append(_collective("gather on stage", "all_gather", group, elements, 1))
    return transfer


def _stage_transfers(model: ModelSpec, deployment: Deployment, tokens: Amount) -> list[Operation]:
    """Return the transfers between all pipeline stages."""
    hops, transfers = hops_between_nodes(deployment), dict[str, Operation]()
    for across in hops:
        for one in stage_transfer(model, deployment, tokens, across):
            before = transfers.get(one.name)
            transfers[one.name] = replace(one, count=before.count + 1 if before else 1)
    return list(transfers.values())


def _collective(name: str, kind: str, group: Group, elements: Amount, count: int, fusible: bool = False) -> Collective:
    within = group.nodes == 1
    named = name if within else f"{name} between nodes"
    return Collective(named, kind, group.gpus, elements, count, fusible and within, group.nodes, group.link)


def heads_per_device(model: ModelSpec, tp: int) -> tuple[int, int]:
    """Return the numbers of query and of KV heads on one device; KV heads are copied if they are fewer than devices."""
    return -(-model.num_heads // tp), max(model.num_kv_heads // tp, 1)


def _projections(model: ModelSpec, deployment: Deployment, sizes: StepSizes) -> list[Operation]:
    """Return the projections of attention and the MLPs of dense layers."""
    tp, tokens = deployment.tensor_parallel_size, sizes.tokens
    layers, hidden = model.kv_layers, model.hidden_size
    heads, kv_heads = heads_per_device(model, tp)
    queries = 2 * heads if model.attention_gate else heads
    gemms: list[Operation] = []
    if model.is_draft_module:
        gemms.append(Gemm("join", tokens, hidden, 2 * hidden, deployment.dtype))
    if isinstance(latent := model.latent, CompressedAttention):
        gemms += compressed_projections(model, latent, heads, tokens, deployment)
    elif latent is not None:
        gemms += latent_projections(model, latent, heads, sizes, deployment)
    else:
        gemms += [
            *_linear("qkv", tokens, (queries + 2 * kv_heads) * model.head_dim, hidden, model, deployment, layers),
            *_linear("attention out", tokens, hidden, heads * model.head_dim, model, deployment, layers),
        ]
    if (linear := model.linear) is not None:
        into, gates, out = linear.conv_dim + linear.value_dim, 2 * linear.linear_num_value_heads, linear.value_dim // tp
        gemms += [
            *_linear("linear in", tokens, into // tp, hidden, model, deployment, model.linear_layers),
            Gemm("linear gates", tokens, gates // tp, hidden, deployment.dtype, model.linear_layers),
            *_linear("linear out", tokens, hidden, out, model, deployment, model.linear_layers),
        ]
    if dense := model.num_layers - model.moe_layers:
        gemms += _mlp("", tokens, -(-model.intermediate_size // tp), model, deployment, dense)
    return gemms


def _mlp(
    which: str, tokens: Amount, inter: int, model: ModelSpec, deployment: Deployment, layers: int
) -> list[Operation]:
    return [
        *_linear(f"{which}gate and up", tokens, 2 * inter, model.hidden_size, model, deployment, layers),
        *_linear(f"{which}down", tokens, model.hidden_size, inter, model, deployment, layers),
    ]


def _linear(
    name: str, tokens: Amount, n: int, k: int, model: ModelSpec, deployment: Deployment, layers: int
) -> list[Operation]:
    """Return the GEMM of a projection, or two GEMMs if a checkpoint leaves some layers in 16 bits."""
    return [
        Gemm(name + part.suffix, tokens, n, k, part.dtype, part.layers, part.width)
        for part in stored(model, deployment, name, layers)
    ]


def _attention(model: ModelSpec, deployment: Deployment, sizes: StepSizes) -> list[Operation]:
    heads, kv_heads = heads_per_device(model, deployment.tensor_parallel_size)
    kv, sharing = kv_dtype(deployment), deployment.decode_context_parallel_size
    if model.latent is not None:
        if deployment.attention == "unfused":
            raise UserError(
                "attention", "unfused", f"is not priced for the latent attention of {model.name}; leave it out"
            )
        if isinstance(model.latent, CompressedAttention):
            return compressed_attention(model.latent, heads, sizes, kv)
        return latent_attention(model.latent, heads, sizes, kv, model.kv_layers, sharing)
    operations: list[Operation] = []
    for suffix, window, layers in (
        ("", 0, model.full_layers),
        (" (window)", model.sliding_window, model.sliding_layers),
    ):
        if not layers:
            continue
        shape = (heads, kv_heads, model.head_dim, kv, window, layers)
        rows, drafted = sizes.decode_rows, sizes.draft_tokens
        if np.any(sizes.prefill_tokens):
            past, pairs = _seen_by_prompts(sizes, window, model.bidirectional)
            prompts, tokens = sizes.prefill_rows, sizes.prefill_tokens
            operations.append(PrefillAttention(f"prefill attention{suffix}", prompts, tokens, past, pairs, *shape))
        if np.any(rows):
            context = sizes.decode_context + rows
            if window:
                context = np.minimum(context, rows * window)
            queries = 1 + drafted / np.maximum(rows, 1)
            own = (heads * sharing, *shape[1:])  # queries of the devices that share the context
            operations.append(DecodeAttention(f"decode attention{suffix}", rows, context / sharing, *own, queries))
    if deployment.attention == "unfused":
        operations += [scores_in_memory(one) for one in operations]
    if model.linear is not None:
        tp = deployment.tensor_parallel_size
        operations += linear_attention(model.linear, tp, sizes, model.linear_layers, deployment.dtype)
    return operations


def scores_in_memory(attention: Operation) -> Scores:
    """Return the extra operation of unfused attention, which keeps its scores in GPU memory.

    Unfused attention is a GEMM, a softmax and a second GEMM. Scores and probabilities are written and read once each,
    in 16 bits (Dao et al., "FlashAttention", NeurIPS 2022, algorithm 0). The scores of prompts are full rectangles, of
    which causal attention needs about half. All prompts of a step are assumed to be equally long.
    """
    assert isinstance(attention, PrefillAttention | DecodeAttention)
    heads, dim = attention.heads, attention.head_dim
    of_prompts = isinstance(attention, PrefillAttention)
    if isinstance(attention, PrefillAttention):
        with_past = attention.tokens * attention.past / np.maximum(attention.rows, 1)
        needed = attention.pairs
        scores = np.maximum(2.0 * needed - with_past - attention.tokens, needed)
    else:
        scores = needed = attention.context * attention.queries
    masked = 4.0 * heads * dim * (scores - needed)
    name = f"{attention.name}, scores in memory"
    return Scores(name, 8.0 * heads * scores, 2, attention.count, masked=masked, of_prompts=of_prompts)


def _seen_by_prompts(sizes: StepSizes, window: int, bidirectional: bool) -> tuple[Amount, Amount]:
    """Return the past KV tokens and query-key pairs of prompts whose queries see at most `window` tokens (0: all).

    A `bidirectional` query sees the whole prompt: n^2 pairs, where a step's sizes have n (n + 1) / 2.
    """
    if bidirectional:
        return sizes.prefill_context, 2 * sizes.prefill_pairs - sizes.prefill_tokens
    if not window:
        return sizes.prefill_context, sizes.prefill_pairs
    past = np.minimum(sizes.prefill_context, sizes.prefill_rows * window)
    return past, np.minimum(sizes.prefill_pairs, sizes.prefill_tokens * float(window))


def _mixture(model: ModelSpec, deployment: Deployment, tokens: Amount) -> list[Operation]:
    if not model.num_experts and deployment.expert_imbalance != 1.0:
        remedy = f"cannot be set, because {model.name} has no experts; leave it out"
        raise UserError("expert_imbalance", deployment.expert_imbalance, remedy)
    check_format(model, deployment)
    check_linear_heads(model, deployment.tensor_parallel_size)
    layers, hidden = model.moe_layers, model.hidden_size
    if not layers:
        return []
    tp, ranks = deployment.tensor_parallel_size, _sharing_experts(deployment)
    routed = tokens * ranks  # the ranks of a data-parallel group step together and share their experts
    busiest = routed * busiest_over_mean(model, deployment, routed)  # the other devices wait for the busiest device
    shape = (hidden, model.moe_intermediate_size, model.experts_per_token, model.num_experts)
    split = (1, tp * ranks) if deployment.enable_expert_parallel else (tp * ranks, 1)
    operations: list[Operation] = [
        Gemm("router", tokens, model.num_experts, hidden, deployment.dtype, layers),
        *(
            Experts(f"experts{part.suffix}", busiest, *shape, *split, part.dtype, part.layers, part.width)
            for part in stored(model, deployment, "experts", layers)
        ),
    ]
    if shared := -(-model.shared_intermediate_size // tp):
        operations += _mlp("shared ", tokens, shared, model, deployment, layers)
    return operations


def _sharing_experts(deployment: Deployment) -> int:
    """Return the number of tensor-parallel groups that share the experts: data-parallel ranks, or those of prompts."""
    return deployment.data_parallel_size * deployment.prefill_context_parallel_size


def _all_reduce(model: ModelSpec, deployment: Deployment, tokens: Amount) -> Collective | None:
    """Return the all-reduces after every layer's attention and MLP as one operation; None without tensor parallelism.

    vLLM fuses it with the norm only if tensor parallelism is the only parallelism.
    """
    tp = deployment.tensor_parallel_size
    if tp == 1:
        return None
    alone = deployment.gpus == tp
    elements = tokens * float(model.hidden_size)
    exchanged = model.moe_layers if deployment.all2all_backend.startswith("deepep") else 0
    count = 2 * model.num_layers - exchanged  # the experts' results need no all-reduce
    return _collective("all-reduce", "all_reduce", tensor_group(deployment), elements, count, alone)


def _between(model: ModelSpec, deployment: Deployment, tokens: Amount) -> list[Operation]:
    """Return the elementwise operations: norms, rotary embedding with the KV write, and activation functions.

    They read and write activations of 16 bits. Without fusion they are the PyTorch operations of transformers'
    `LlamaDecoderLayer`, `LlamaRMSNorm`, `apply_rotary_pos_emb` and `LlamaMLP`, each of which reads and writes its
    tensors in memory. A norm is nine operations: add the residual, cast to float32, square, take the mean, add epsilon,
    take the inverse root, multiply, cast to 16 bits, and multiply by the weight.
    """
    tp, fused = deployment.tensor_parallel_size, deployment.fusion
    if not fused and (model.latent is not None or model.linear is not None):
        raise UserError("fusion", False, f"is not priced for the attention of {model.name}; leave it out")
    heads, kv_heads = heads_per_device(model, tp)
    normed, norm_launches = (8.0, 1) if fused else (42.0, 9)  # bytes of an element
    rotated, written, rotary_launches = (4.0, 4.0, 1) if fused else (20.0, 4.0, 12)
    activated, activation_launches = (6.0, 1) if fused else (10.0, 2)
    after = _all_reduce(model, deployment, tokens) if fused else None
    moved = tokens * (normed * model.hidden_size)
    operations: list[Operation] = [Elementwise("norms", moved, norm_launches, 2 * model.num_layers, after)]
    if isinstance(latent := model.latent, CompressedAttention):
        streams = model.residual_streams
        operations += compressed_elementwise(latent, heads, model.hidden_size, streams, tokens, model.num_layers)
    elif model.latent is not None:
        operations += latent_elementwise(model.latent, heads, tokens, model.kv_layers)
    else:
        if model.bidirectional:  # keys and values are read from the projections' output
            written = 0.0
        of_keys = rotated if fused else rotated + written  # a fused kernel writes keys without reading them again
        moved = tokens * ((rotated * heads + (of_keys + written) * kv_heads) * model.head_dim)
        operations.append(Elementwise("rotary, KV write", moved, rotary_launches, model.kv_layers))
    if model.attention_gate:
        operations.append(Elementwise("attention gate", tokens * (6.0 * heads * model.head_dim), count=model.kv_layers))
    if model.linear is not None:
        moved = tokens * (6.0 * (model.linear.value_dim // tp))
        operations.append(Elementwise("gated norm", moved, count=model.linear_layers))
    if dense := model.num_layers - model.moe_layers:
        moved = tokens * (activated * (model.intermediate_size // tp))
        operations.append(Elementwise("activation", moved, activation_launches, dense))
    return operations


def logit_operations(model: ModelSpec, deployment: Deployment, rows: Amount) -> list[Operation]:
    """Return the operations that turn `rows` hidden states into probabilities of tokens."""
    operations = _head(model, deployment.tensor_parallel_size, rows)
    if deployment.tensor_parallel_size > 1:
        operations.append(_gather_logits(model, deployment, rows))
    return operations


def _head(model: ModelSpec, tp: int, sampled: Amount) -> list[Operation]:
    vocabulary = -(-model.vocab_size // tp)
    return [
        Gemm("head", sampled, vocabulary, model.hidden_size),
        Elementwise("sampler", sampled * (8.0 * model.vocab_size), launches=4),
    ]


def _collectives(model: ModelSpec, deployment: Deployment, tokens: Amount, sampled: Amount) -> list[Operation]:
    ranks = _sharing_experts(deployment)
    operations: list[Operation] = []
    if all_reduce := _all_reduce(model, deployment, tokens):
        operations.append(all_reduce)
        operations.append(_gather_logits(model, deployment, sampled))
    if ranks > 1 and model.num_experts and deployment.all2all_backend.startswith("deepep"):
        operations += _exchanges(model, deployment, tokens)
    elif ranks > 1 and model.num_experts:
        message = tokens * ranks * float(model.hidden_size)
        group = data_group(deployment) if deployment.data_parallel_size > 1 else context_group(deployment)
        operations.append(_collective("dispatch", "all_gather", group, message, model.moe_layers))
        operations.append(_collective("combine", "reduce_scatter", group, message, model.moe_layers))
    return operations


def _gather_logits(model: ModelSpec, deployment: Deployment, sampled: Amount) -> Collective:
    logits = sampled * float(model.vocab_size)
    return _collective("gather logits", "all_gather", tensor_group(deployment), logits, 1)


def _exchanges(model: ModelSpec, deployment: Deployment, tokens: Amount) -> list[Operation]:
    """Return DeepEP's exchanges of tokens and the gathering of their results.

    As in vLLM, each device of a tensor-parallel group sends a part of the group's tokens, and the devices gather the
    results.
    """
    tensor, (gpus, nodes, link) = tensor_group(deployment), expert_group(deployment)
    mode = deployment.all2all_backend.removeprefix("deepep_")
    suffix = " between nodes" if nodes > 1 else ""
    (experts, *_) = stored(model, deployment, "experts", model.moe_layers)
    elements = tokens * float(model.hidden_size)
    operations: list[Operation] = [
        Exchange(
            phase + suffix,
            phase,
            gpus,
            elements / tensor.gpus,
            model.moe_layers,
            nodes=nodes,
            link=link,
            hidden=model.hidden_size,
            topk=model.experts_per_token,
            mode=mode,
            fp8=phase == "dispatch" and experts.dtype.startswith("fp8"),
        )
        for phase in ("dispatch", "combine")
    ]
    if tensor.gpus > 1:
        operations.append(_collective("gather tokens", "all_gather", tensor, elements, model.moe_layers))
    return operations
