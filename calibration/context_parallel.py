"""Context parallelism as operations: the share of one device in a step, and the exchanges that sharing tokens needs.

Prefill context parallelism (`prefill_context_parallel_size`, p groups) is that of vLLM 0.32 (`PCPManager`). A chunk of
a prompt is cut into 2p pieces. Group r computes pieces r and 2p - 1 - r, so all groups have equally many query-key
pairs. Each layer gathers the keys and values of all new tokens on all groups, which therefore all keep the whole KV.
Decode rows are divided, too, and hidden states are gathered before sampling.

Decode context parallelism (`decode_context_parallel_size`, d devices) divides the KV of each position range among d
devices of a tensor-parallel group, which would otherwise hold copies. Queries are gathered on all d devices, each
attends with d times the heads to its share of the context, and the outputs are combined by their log-sum-exp and
scattered (the backend `ag_rs`). Prompts attend to earlier tokens in the same way, except that models with latent
attention gather the latent vectors instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tokentwin.calibration.operations import Amount, Collective, Operation, StepSizes
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.inter_node import Group, context_group, kv_group
from tokentwin.serving.deployments.model_spec import ModelSpec


@dataclass(frozen=True)
class DecodeExchange(Collective):
    """An exchange of the attention of decode rows, which share their context with other devices."""


@dataclass(frozen=True)
class PastExchange(Collective):
    """An exchange of the attention of prompts to earlier tokens, which other devices keep."""


_LSE_ELEMENTS = 2.0  # a log-sum-exp in float32, in elements of 16 bits


def share_of_step(deployment: Deployment, sizes: StepSizes) -> StepSizes:
    """Return the sizes of the share of a step that one tensor-parallel group computes; `sampled_rows` stay whole."""
    groups = deployment.prefill_context_parallel_size
    if groups == 1:
        return sizes
    tokens = np.asarray(sizes.prefill_tokens, dtype=np.float64)
    rows = np.asarray(sizes.decode_rows, dtype=np.float64)
    kept = np.ceil(rows / groups)  # the busiest group
    share = kept / np.maximum(rows, 1.0)
    return replace(
        sizes,
        prefill_rows=2.0 * np.asarray(sizes.prefill_rows, dtype=np.float64),
        prefill_tokens=np.maximum(tokens / groups, np.minimum(tokens, 1.0)),
        # the pieces r and 2p - 1 - r of n tokens follow (2p - 1) / 2p n of the tokens together
        prefill_context=2.0 * np.asarray(sizes.prefill_context) + tokens * (2 * groups - 1) / (2 * groups),
        prefill_pairs=np.asarray(sizes.prefill_pairs) / groups,
        decode_rows=kept,
        decode_context=np.asarray(sizes.decode_context) * share,
    )


def context_exchanges(
    model: ModelSpec, deployment: Deployment, sizes: StepSizes, heads: int, kv_heads: int
) -> list[Operation]:
    """Return the exchanges of a whole step of `sizes` on a device with `heads` heads and `kv_heads` KV heads."""
    operations: list[Operation] = []
    if deployment.prefill_context_parallel_size > 1:
        operations += _of_prompts(model, context_group(deployment), sizes.tokens, kv_heads)
    if deployment.decode_context_parallel_size > 1:
        operations += _of_blocks(model, kv_group(deployment), sizes, heads)
    return operations


def _of_prompts(model: ModelSpec, group: Group, tokens: Amount, kv_heads: int) -> list[Operation]:
    width = 2.0 * kv_heads * model.head_dim
    if model.latent is not None:
        width = model.latent.kv_dim + model.latent.index_bytes / 2
    hidden = tokens * float(model.hidden_size)
    return [
        _within("gather KV", "all_gather", group, tokens * width, model.kv_layers),
        _within("gather hidden states", "all_gather", group, hidden, 1),
    ]


def _of_blocks(model: ModelSpec, group: Group, sizes: StepSizes, heads: int) -> list[Operation]:
    rows = _combined(model, group, sizes.decode_rows + sizes.draft_tokens, heads, DecodeExchange, "")
    past = np.asarray(sizes.prefill_context, dtype=np.float64)
    if model.latent is not None:
        width = float(model.latent.kv_dim)
        return [*rows, _within("gather past KV", "all_gather", group, past * width, model.kv_layers, PastExchange)]
    later = np.where(past > 0, sizes.prefill_tokens, 0)
    return [*rows, *_combined(model, group, later, heads, PastExchange, " of prompts")]


def _combined(
    model: ModelSpec, group: Group, queries: Amount, heads: int, kind: type[Collective], suffix: str
) -> list[Operation]:
    """Return the exchanges for `queries` tokens whose `heads` heads attend on every device of `group`."""
    query = value = float(model.head_dim)
    if model.latent is not None:
        query, value = float(model.latent.kv_dim), float(model.latent.kv_lora_rank)
    shared, layers = queries * float(heads * group.gpus), model.kv_layers
    return [
        _within(f"gather queries{suffix}", "all_gather", group, shared * query, layers, kind),
        _within(f"gather log-sums{suffix}", "all_gather", group, shared * _LSE_ELEMENTS * group.gpus, layers, kind),
        _within(f"scatter outputs{suffix}", "reduce_scatter", group, shared * value, layers, kind),
    ]


def _within(
    name: str, kind: str, group: Group, elements: Amount, count: int, form: type[Collective] = Collective
) -> Collective:
    """Return a collective of `group`, which may span nodes."""
    named = f"{name} between nodes" if group.nodes > 1 else name
    return form(named, kind, group.gpus, elements, count, nodes=group.nodes, link=group.link)
