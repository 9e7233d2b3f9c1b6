"""From a rank's weights by name to what multiplies: each is taken once, merged, converted or rounded.

Weights of a linear layer are stored in one of three ways, which their names tell: `weight` in the model's type;
`weight` in e4m3 with `weight_scale` (`Fp8Weight`); `weight_packed` with `weight_scale` and, where they are not all in
the middle, `weight_zero_point` (`PackedWeight`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from realengine.expert_weights import StoredWeight
from realengine.fp8_weight import Fp8Weight
from realengine.layer_ops import LayerOps
from realengine.packed_weight import PackedWeight, quantise
from realengine.projection import DenseProjection, Fp8Projection, Projection, quantised
from serving.deployments.model_spec import ModelSpec
from serving.errors import UserError

QUANTIZATIONS = ("none", "fp8", "int4", "int8")  # what 16-bit weights can be rounded to
_WAYS = ("weight_packed", "weight_scale", "weight")  # in the order in which they are told apart


def rounded(weight: torch.Tensor, quantization: str) -> StoredWeight:
    """16-bit weights `[out, in]` as one of `QUANTIZATIONS`."""
    if quantization == "none":
        return weight
    return Fp8Weight(*quantised(weight)) if quantization == "fp8" else quantise(weight, quantization)


class WeightLoader:
    """Takes weights out of `state`, one by one: merged or rounded, none need exist twice.

    quantization  what 16-bit weights of linear layers are rounded to, as `Deployment` names it; none: they are kept, as
                  those of a quantised checkpoint always are
    """

    def __init__(
        self,
        spec: ModelSpec,
        state: dict[str, torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
        ops: LayerOps,
        quantization: str = "none",
    ) -> None:
        self._spec, self._state, self._ops = spec, state, ops
        self._quantization = quantization if spec.checkpoint_quantization == "none" else "none"
        self._dtype, self._device = dtype, device

    def take(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The weight called `name`, in `dtype` or the model's type, on the device."""
        return self._state.pop(name).to(device=self._device, dtype=dtype or self._dtype).contiguous()

    def kv_scales(self, index: int) -> tuple[float, float]:
        """What keys and values of layer `index` are divided by in an FP8 cache; 1 if the checkpoint has no scales."""
        found = (self._state.pop(f"model.layers.{index}.self_attn.{name}", None) for name in ("k_scale", "v_scale"))
        k_scale, v_scale = (1.0 if scale is None else float(scale) for scale in found)
        return k_scale, v_scale

    def projection(self, modules: Sequence[str], bias: bool = False) -> Projection:
        """Linear layers that share their input as one. Raises UserError if they are stored in different ways."""
        added = torch.cat([self.take(f"{module}.bias") for module in modules]) if bias else None
        self._check_alike(modules)
        weight = self._rounded(modules)
        if isinstance(weight, torch.Tensor):
            return DenseProjection(weight, added)
        if isinstance(weight, Fp8Weight):
            return Fp8Projection(*weight, added)
        return self._ops.packed(weight, self._dtype, added)

    def experts(self, modules: Sequence[Sequence[str]]) -> Any:
        """For each expert the linear layers that share their input, as `LayerOps.experts` takes them. Raises UserError
        if they are stored in different ways."""
        self._check_alike([module for expert in modules for module in expert])
        return self._ops.expert_weights(map(self._rounded, modules), len(modules), self._dtype)

    def unrounded(self, module: str) -> torch.Tensor:
        """The weight of a linear layer that is never rounded, as routers are not: `[out, in]`, however it is stored."""
        weight = self._stored([module])
        return weight if isinstance(weight, torch.Tensor) else weight.dense(self._dtype)

    def _way(self, module: str) -> str:
        return next(way for way in _WAYS if f"{module}.{way}" in self._state)

    def _check_alike(self, modules: Sequence[str]) -> None:
        for module in modules:
            if self._way(module) != self._way(modules[0]):
                remedy = f"is not stored as {modules[0]} is, though both are multiplied at once; use another checkpoint"
                raise UserError("model", module, remedy)

    def _stored(self, modules: Sequence[str]) -> StoredWeight:
        way = self._way(modules[0])
        if way == "weight_packed":
            return self._packed(modules)
        if way == "weight_scale":
            return Fp8Weight(self._merged(modules, "weight"), self._merged(modules, "weight_scale"))
        return torch.cat([self.take(f"{module}.weight") for module in modules])

    def _rounded(self, modules: Sequence[str]) -> StoredWeight:
        """As it is stored, or 16 bits as `quantization` says."""
        weight = self._stored(modules)
        return rounded(weight, self._quantization) if isinstance(weight, torch.Tensor) else weight

    def _packed(self, modules: Sequence[str]) -> PackedWeight:
        spec = self._spec
        bits = int(spec.checkpoint_quantization.removeprefix("int"))
        zeros = any(f"{module}.weight_zero_point" in self._state for module in modules)
        parts = [self._merged(modules, part) for part in ("weight_packed", "weight_scale")]
        zero = self._merged(modules, "weight_zero_point") if zeros else None
        whole = PackedWeight(*parts, zero, bits, 0)  # type: ignore[arg-type]
        return whole._replace(group=spec.checkpoint_group_size or whole.inputs)

    def _merged(self, modules: Sequence[str], part: str) -> torch.Tensor:
        """As they are stored: their numbers mean nothing in another type."""
        return torch.cat([self._state.pop(f"{module}.{part}").to(self._device) for module in modules])
