"""The matrices of LoRA adapters in the slots of a device, and the product with them.

A batch mixes rows of several adapters and of the base model. `pack` puts rows with the same slot next to one another,
so that the tokens of an adapter are a few ranges of the step (`Segment`). For each range a projection adds B (A x) to
its result: two small GEMMs for one layer, and three for projections that share a GEMM. No token is multiplied with
another adapter's matrices. This is plain torch, the same on every device; the host launches it kernel by kernel, so
steps with adapters do not run as graphs.

Every slot has room for `max_lora_rank` and for all target modules, as in vLLM. The rest of a smaller adapter is zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from tokentwin.realengine.models.linear import Projection
from tokentwin.realengine.step_input import HostAdapter, Segment
from tokentwin.serving.deployments.lora import LoraConfig

Matrices = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""The matrices A `[rank, in]` and B `[out, rank]` of an adapter by module; the adapter's scale is a part of B."""

MERGED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "o_proj": ("o_proj",),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}
"""The projections of each target module, which one GEMM computes."""


def target_projections(lora: LoraConfig) -> frozenset[str]:
    """Return the names of the projections that adapters may change."""
    return frozenset(part for name in lora.target_modules or MERGED for part in MERGED[name])


class _ProjectionSlots(NamedTuple):
    """The slots of one projection, whose parts have the same input.

    Attributes:
        modules: names of the parts
        a: [slots, parts * rank, in]
        b: [slots, out, rank] of each part
    """

    modules: Sequence[str]
    a: torch.Tensor
    b: Sequence[torch.Tensor]

    @property
    def matrices(self) -> Iterator[torch.Tensor]:
        yield self.a
        yield from self.b


class LoraSlots:
    """All slots of a device; `segments` are the tokens with adapters of the step that is computed next."""

    def __init__(self, lora: LoraConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._slots, self._rank = lora.max_loras, lora.max_lora_rank
        self._targets = target_projections(lora)
        self._dtype, self._device = dtype, device
        self._projections: list[_ProjectionSlots] = []
        self.segments: Sequence[Segment] = ()

    def adapted(self, modules: Sequence[str], shapes: Sequence[Sequence[int]], projection: Projection) -> Projection:
        """Return `projection` with slots for adapters of its `modules`, or unchanged if adapters do not change them.

        `shapes` are `[out, in]` of each module.
        """
        if modules[0].rpartition(".")[2] not in self._targets:
            return projection
        inputs = shapes[0][1]
        sizes = [(len(modules) * self._rank, inputs), *((outputs, self._rank) for outputs, _ in shapes)]
        a, *b = (torch.zeros((self._slots, *size), dtype=self._dtype, device=self._device) for size in sizes)
        self._projections.append(_ProjectionSlots(modules, a, b))
        return AdaptedProjection(projection, self, a, b)

    def on_host(self, matrices: Matrices) -> HostAdapter:
        """Return an adapter in the form of a slot: the matrices of all projections in order, padded with zeros."""
        made: list[torch.Tensor] = []
        for projection in self._projections:
            host = [torch.zeros(matrix.shape[1:], dtype=self._dtype) for matrix in projection.matrices]
            for part, module in enumerate(projection.modules):
                if module in matrices:
                    low, high = matrices[module]
                    host[0][part * self._rank :][: len(low)] = low
                    host[1 + part][:, : len(low)] = high
            made += host
        return made

    def fill(self, slot: int, adapter: HostAdapter) -> None:
        """Copy `adapter` into a slot, after all work that was submitted before."""
        slots = (matrix for projection in self._projections for matrix in projection.matrices)
        for matrix, ours in zip(slots, adapter, strict=True):
            matrix[slot].copy_(ours, non_blocking=True)


class AdaptedProjection:
    """A projection that adds the product of each token's adapter in `slots`; `a` and `b` are its own matrices."""

    fp8 = False

    def __init__(self, projection: Projection, slots: LoraSlots, a: torch.Tensor, b: Sequence[torch.Tensor]) -> None:
        self._projection, self._slots, self._a, self._b = projection, slots, a, b

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self._projection(x)
        for slot, first, end in self._slots.segments:
            lows = (x[first:end] @ self._a[slot].t()).chunk(len(self._b), dim=1)
            begin = 0
            for low, b in zip(lows, self._b, strict=True):
                outputs = b.shape[1]
                out[first:end, begin : begin + outputs].addmm_(low, b[slot].t())
                begin += outputs
        return out
