"""The paged KV cache: one tensor of fixed-size blocks for all layers, addressed by the scheduler's block ids.

A token's *slot* is `block * block_size + offset`. Block 0 is the null block: padding rows read and write it. Within a
block, the tokens of one head are contiguous, because attention reads them in that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch

from tokentwin.serving.deployments.model_spec import ModelSpec

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max


class LayerKv(NamedTuple):
    """One layer's keys and values, each `[blocks, kv_heads, block_size, head_dim]`, divided by their scales."""

    keys: torch.Tensor
    values: torch.Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0


class KvCache:
    """Keys and values of every layer. `dtype` may be `torch.float8_e4m3fn`, whose range is enough without scales.

    `groups` is the window of each group of layers, as in `SchedulerConfig.kv_groups`. A block has room for the layers
    of one group. Layers of different groups share the tensor, but never a block. Without groups all layers share one
    block table, which also keeps blocks that sliding windows have passed.

    Attributes:
        windows: window of each kind of layer in tokens; 0 for full attention
        tables: index of the block table of each kind
        kind_of: index of the kind of each layer
        scales: scales of each layer's keys and values, if a checkpoint has them; None: all are 1
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: Sequence[tuple[float, float]] | None = None,
        groups: tuple[int, ...] = (),
    ) -> None:
        if groups:
            self.windows, self.tables = groups, tuple(range(len(groups)))
            self.kind_of, self._place = _grouped(spec, groups)
        else:
            windows = [spec.sliding_window if layer in spec.sliding_at else 0 for layer in range(spec.num_layers)]
            self.windows = tuple(sorted(set(windows)))
            self.tables = (0,) * len(self.windows)
            self.kind_of = [self.windows.index(window) for window in windows]
            self._place = list(range(spec.num_layers))
        shape = (max(self._place) + 1, 2, num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.dtype = dtype
        self._tensor = torch.zeros(shape, dtype=dtype, device=device)
        self._scales = scales or [(1.0, 1.0)] * spec.num_layers

    @property
    def block_shape(self) -> tuple[int, ...]:
        """`[layers, 2, kv_heads, block_size, head_dim]`."""
        layers, two, _, *rest = self._tensor.shape
        return (layers, two, *rest)

    @property
    def block_bytes(self) -> int:
        """Size of one block in bytes: keys and values of all layers that it has room for."""
        return prod(self.block_shape) * self.dtype.itemsize

    def block(self, index: int) -> torch.Tensor:
        """Return a view of one block in `block_shape`: keys and values of all its layers; writes go to the cache."""
        return self._tensor[:, :, index]

    def layer(self, index: int) -> LayerKv:
        keys, values = self._tensor[self._place[index]]
        return LayerKv(keys, values, *self._scales[index])


def _grouped(spec: ModelSpec, windows: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return each layer's group and its index there; layers of a kind are dealt to its groups in turn, as in vLLM."""
    if len(windows) == 1:
        return [0] * spec.num_layers, list(range(spec.num_layers))
    seen = {False: 0, True: 0}
    groups, places = [], []
    for layer in range(spec.num_layers):
        slides = layer in spec.sliding_at
        alike = [group for group, window in enumerate(windows) if bool(window) == slides]
        place, which = divmod(seen[slides], len(alike))
        groups.append(alike[which])
        places.append(place)
        seen[slides] += 1
    return groups, places


def write(kv: LayerKv, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Store `keys` and `values` `[tokens, kv_heads, head_dim]` at `slots` `[tokens]`, in the cache's dtype.

    A number beyond the range of FP8 is stored as the largest FP8 number; torch alone would make it NaN.
    """
    block_size = kv.keys.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    if kv.keys.dtype == FP8:
        scaled = (keys / kv.k_scale, values / kv.v_scale)
        keys, values = (x.clamp(-_LARGEST, _LARGEST) for x in scaled)
    kv.keys[blocks, :, offsets] = keys.to(kv.keys.dtype)
    kv.values[blocks, :, offsets] = values.to(kv.values.dtype)


def read(
    kv: LayerKv, blocks: torch.Tensor, skipped: int, tokens: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values `[kv_heads, tokens, head_dim]` of the tokens after the first `skipped` in `blocks`."""
    wanted = slice(skipped, skipped + tokens)
    keys, values = (t.index_select(0, blocks).transpose(0, 1).flatten(1, 2)[:, wanted].to(dtype) for t in kv[:2])
    return (keys, values) if kv.k_scale == kv.v_scale == 1.0 else (keys * kv.k_scale, values * kv.v_scale)
