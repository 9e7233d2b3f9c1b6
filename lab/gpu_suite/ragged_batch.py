"""One layer's part of a step with random content, packed as the engine packs it.

Kernels are checked and timed on such a step, and called as the engine calls them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tokentwin.realengine.attention import ATTENTION
from tokentwin.realengine.attention.backend import Attention
from tokentwin.realengine.attention.kv_cache import LayerKv
from tokentwin.realengine.kernels.launches import Shape
from tokentwin.realengine.models.layer_ops import LayerOps
from tokentwin.realengine.step_input import Batch, RowInput, pack
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.deployments.model_spec import ModelSpec
from tokentwin.serving.user_code.plugins import find

Row = tuple[int, int]  # KV tokens including this step's, and query tokens
Draw = tuple[float, int, float, float]  # temperature, top-k, top-p, uniform number


class Backend(NamedTuple):
    """The operations of a layer as the engine gets them, for one shape."""

    attention: Attention
    ops: LayerOps


class Numbers:
    """Normally distributed random numbers on `device`; only shapes on the meta device."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self.device = device
        self._draw = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
        """Return a tensor of that shape and dtype, times `scale`."""
        made = torch.empty(shape, dtype=dtype, device=self.device).normal_(generator=self._draw)
        return made if scale == 1 else made.mul_(scale)


class _Processors(NamedTuple):
    """The part of a device that attention needs."""

    multiprocessors: int


def layer_spec(shape: Shape, norms: bool = False, interleaved: bool = False) -> ModelSpec:
    """Return a model with the attention of `shape`; its other sizes do not matter.

    `norms` are norms of query and key heads, `interleaved` is the kind of rotation.
    """
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
    """Return the backend `name` of a deployment for contexts of at most `longest` tokens.

    Raises UserError if its library is not installed.
    """
    config = SchedulerConfig(max_model_len=longest, block_size=page)
    deployment = Deployment(device="cuda", batch_invariant=batch_invariant, scheduler=config)
    processors: Any = _Processors(_multiprocessors(device))
    make: Any = find("attention", name, ATTENTION, ("attend",))
    attention = make(spec, deployment, processors)
    if name == "torch":
        return Backend(attention, LayerOps(spec))
    from tokentwin.realengine.models.triton_ops import TritonOps

    return Backend(attention, TritonOps(spec))


def _multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors, by which KV is divided among programs; an H200's on meta."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return find_gpu("H200").sm_count if device.type == "meta" else 4


def batch_of(
    rows: Sequence[Row],
    page: int,
    attention: Attention,
    device: torch.device,
    seed: int = 0,
    draws: Sequence[Draw | None] | None = None,
) -> Batch:
    """Return a step of `rows`, which samples greedily or, with `draws`, at random.

    The rows' KV blocks lie in random order in a cache of `pool_blocks` blocks.
    """
    needs = [-(-context // page) for context, _ in rows]
    shuffled = np.random.default_rng(seed).permutation(np.arange(1, 1 + sum(needs), dtype=np.int32))
    ends = np.cumsum(needs)
    inputs = [
        RowInput((0,) * tokens, context - tokens, shuffled[end - need : end], 0, (draw,))
        for (context, tokens), need, end, draw in zip(rows, needs, ends, draws or [None] * len(rows), strict=True)
    ]
    step = pack(inputs, page, 0, attention.tiles).step
    return Batch.from_buffer(torch.from_numpy(step.packed).to(device), step.layout, step.packed)


def pool_blocks(rows: Sequence[Row], page: int) -> int:
    """Return the number of blocks of a cache for `batch_of` these rows, including the null block."""
    return 1 + sum(-(-context // page) for context, _ in rows)


def random_cache(shape: Shape, blocks: int, numbers: Numbers) -> LayerKv:
    """Return random keys and values in every place of a cache."""
    size = (blocks, shape.kv_heads, shape.page, shape.dim)
    keys, values = (numbers(*size, dtype=shape.dtype).to(shape.cached) for _ in range(2))
    return LayerKv(keys, values)


def context_slots(batch: Batch, page: int) -> Tensor:
    """Return every slot (int64) that holds a token of some row's context."""
    assert batch.host is not None
    blocks = batch.host[batch.layout.places()["blocks"]].astype(np.int64)
    slots = []
    for context, start in zip(batch.on_host("context"), batch.on_host("table_start"), strict=True):
        at = np.arange(context)
        slots.append(blocks[start + at // page] * page + at % page)
    return torch.from_numpy(np.concatenate(slots)).to(batch.blocks.device)


def outside_is_nan(kv: LayerKv, slots: Tensor) -> LayerKv:
    """Return `kv` with NaN outside the `slots`."""
    kept = []
    for cache in kv[:2]:
        blocks, _, page, _ = cache.shape
        written = torch.zeros(blocks * page, dtype=torch.bool, device=cache.device)
        written[slots] = True
        inside = written.view(blocks, 1, page, 1)
        kept.append(torch.where(inside, cache.float(), torch.nan).to(cache.dtype))
    keys, values = kept
    return LayerKv(keys, values)
