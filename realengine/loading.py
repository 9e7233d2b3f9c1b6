"""From a rank's weights by name to what multiplies: each is taken once, merged, converted or rounded.

Weights of a linear layer are stored in one of three ways, which their names tell: `weight` in the model's type;
`weight` in e4m3 with `weight_scale`; `weight_packed` with `weight_scale` and, where they are not all in the middle,
`weight_zero_point`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from realengine.layer_ops import LayerOps
from realengine.packed_weight import PackedWeight, quantise
from realengine.projection import DenseProjection, Fp8Projection, Projection, quantised
from serving.deployments.model_spec import ModelSpec
from serving.errors import UserError

QUANTIZATIONS = ("none", "fp8", "int4", "int8")  # what 16-bit weights can be rounded to
_WAYS = ("weight_packed", "weight_scale", "weight")  # in the order in which they are told apart


class WeightLoader:
    """Takes weights out of `state`, one by one: merged or rounded, none need exist twice.

    quantization  what 16-bit weights of linear layers are rounded to, as `Deployment` names it; none: they are kept
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
        self._spec, self._state, self._ops, self._quantization = spec, state, ops, quantization
        self._dtype, self._device = dtype, device

    def take(self, name: str) -> torch.Tensor:
        """The weight called `name`, in the model's type on the device."""
        return self._state.pop(name).to(device=self._device, dtype=self._dtype).contiguous()

    def kv_scales(self, index: int) -> tuple[float, float]:
        """What keys and values of layer `index` are divided by in an FP8 cache; 1 if the checkpoint has no scales."""
        found = (self._state.pop(f"model.layers.{index}.self_attn.{name}", None) for name in ("k_scale", "v_scale"))
        k_scale, v_scale = (1.0 if scale is None else float(scale) for scale in found)
        return k_scale, v_scale

    def projection(self, modules: Sequence[str], bias: bool = False) -> Projection:
        """Linear layers that share their input as one. Raises UserError if they are stored in different ways."""
        added = torch.cat([self.take(f"{module}.bias") for module in modules]) if bias else None
        ways = [next(way for way in _WAYS if f"{module}.{way}" in self._state) for module in modules]
        if len(set(ways)) > 1:
            remedy = f"is not stored as {modules[0]} is, though both are multiplied at once; use another checkpoint"
            raise UserError("model", modules[1 if ways[1] != ways[0] else -1], remedy)
        if ways[0] == "weight_packed":
            return self._ops.packed(self._packed(modules), self._dtype, added)
        if ways[0] == "weight_scale":
            return Fp8Projection(self._merged(modules, "weight"), self._merged(modules, "weight_scale"), added)
        weight = torch.cat([self.take(f"{module}.weight") for module in modules])
        if self._quantization == "none" or self._spec.checkpoint_quantization != "none":
            return DenseProjection(weight, added)
        if self._quantization == "fp8":
            return Fp8Projection(*quantised(weight), added)
        return self._ops.packed(quantise(weight, self._quantization), self._dtype, added)

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
