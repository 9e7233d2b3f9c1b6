"""One layer's share of a step with random content, packed as the engine packs it.

Kernels are checked and timed on it through the interfaces that the engine calls them by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from realengine.attention import Attention, TorchAttention
from realengine.kernels.attention_shapes import Shape
from realengine.kv_cache import LayerKv
from realengine.layer_ops import LayerOps, TorchOps
from realengine.step_input import Batch, RowInput, pack
from serving.config import SchedulerConfig
from serving.model_spec import ModelSpec

Row = tuple[int, int]  # KV tokens with this step's, and query tokens
Draw = tuple[float, int, float, float]  # temperature, top-k, top-p, uniform number


class Backend(NamedTuple):
    """The operations of a layer as the engine gets them, for one shape."""

    attention: Attention
    ops: LayerOps


class _Processors(NamedTuple):
    """The part of a device that attention wants."""

    multiprocessors: int


def layer_spec(shape: Shape, norms: bool = False, interleaved: bool = False) -> ModelSpec:
    """A model with such attention, of no size otherwise; `norms` of query and key heads, `interleaved` rotation."""
    return ModelSpec(
        name=shape.model,
        family="qwen3" if norms else "llama",
        vocab_size=1,
        hidden_size=shape.heads * shape.dim,
        num_layers=1,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.dim,
        intermediate_size=1,
        max_positions=1 << 17,
        rope_theta=10000.0,
        rope_interleaved=interleaved,
        qk_norm=norms,
    )


def backend_for(
    name: str, spec: ModelSpec, page: int, device: torch.device, longest: int, batch_invariant: bool = False
) -> Backend:
    """`name` is "torch", "triton" or "hybrid", as in a deployment. `longest` context, in tokens, and the device decide
    how decode rows are split."""
    if name == "torch":
        return Backend(TorchAttention(page), TorchOps(spec))
    from realengine.triton_attention import HybridAttention, TritonAttention
    from realengine.triton_ops import TritonOps

    count = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    config = SchedulerConfig(max_model_len=longest, block_size=page)
    kind = TritonAttention if name == "triton" else HybridAttention
    return Backend(kind(spec, config, _Processors(count), batch_invariant), TritonOps(spec))  # type: ignore[arg-type]


def batch_of(
    rows: Sequence[Row],
    page: int,
    attention: Attention,
    device: torch.device,
    seed: int = 0,
    draws: Sequence[Draw | None] | None = None,
) -> Batch:
    """A step of `rows`, their blocks shuffled over a cache of `pool_blocks`; greedy, or with a draw for each row."""
    needs = [-(-context // page) for context, _ in rows]
    shuffled = np.random.default_rng(seed).permutation(np.arange(1, 1 + sum(needs), dtype=np.int32))
    ends = np.cumsum(needs)
    inputs = [
        RowInput((0,) * tokens, context - tokens, shuffled[end - need : end], 0, True, draw)
        for (context, tokens), need, end, draw in zip(rows, needs, ends, draws or [None] * len(rows), strict=True)
    ]
    step = pack(inputs, page, 0, attention.tiles).step
    return Batch.of(torch.from_numpy(step.packed).to(device), step.layout, step.packed)


def pool_blocks(rows: Sequence[Row], page: int) -> int:
    """Blocks of a cache for `batch_of` these rows: the null block, and what they need."""
    return 1 + sum(-(-context // page) for context, _ in rows)


def random_cache(shape: Shape, blocks: int, draw: torch.Generator) -> LayerKv:
    """Keys and values with a number everywhere."""
    made = (
        torch.empty(blocks, shape.kv_heads, shape.page, shape.dim, dtype=shape.dtype, device=draw.device).normal_(
            generator=draw
        )
        for _ in range(2)
    )
    return LayerKv(*(cache.to(shape.cached) for cache in made))


def context_slots(batch: Batch, page: int) -> Tensor:
    """Every slot, int64, that holds a token of some row's context."""
    slots = []
    for context, start in zip(batch.on_host("context"), batch.on_host("table_start"), strict=True):
        at = torch.arange(context, device=batch.blocks.device)
        slots.append(batch.blocks[start + at // page].long() * page + at % page)
    return torch.cat(slots)


def outside_is_nan(kv: LayerKv, slots: Tensor) -> LayerKv:
    """`kv` where `slots` are, NaN elsewhere."""
    kept = []
    for cache in kv:
        blocks, _, page, _ = cache.shape
        written = torch.zeros(blocks * page, dtype=torch.bool, device=cache.device)
        written[slots] = True
        inside = written.view(blocks, 1, page, 1)
        kept.append(torch.where(inside, cache.float(), torch.nan).to(cache.dtype))
    return LayerKv(*kept)
