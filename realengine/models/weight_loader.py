"""A loader that turns a rank's weights into projections; it merges, converts or rounds each weight.

Linear layers that share one multiplication must be stored in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tokentwin.realengine.models.layer_ops import LayerOps
from tokentwin.realengine.models.linear import (
    DenseProjection,
    Fp8Projection,
    Fp8Weight,
    Projection,
    StoredWeight,
    each_tensor,
    joined,
    round_to_fp8,
    round_to_integers,
)
from tokentwin.realengine.models.lora_slots import LoraSlots
from tokentwin.serving.deployments.model_spec import ModelSpec
from tokentwin.serving.errors import UserError

QUANTIZATIONS = ("none", "fp8", "int4", "int8")  # types that 16-bit weights can be rounded to


def rounded(weight: torch.Tensor, quantization: str) -> StoredWeight:
    """Round 16-bit weights `[out, in]` to `quantization`, one of `QUANTIZATIONS`."""
    if quantization == "none":
        return weight
    return Fp8Weight(*round_to_fp8(weight)) if quantization == "fp8" else round_to_integers(weight, quantization)


class WeightLoader:
    """A loader that takes weights out of `state` one by one, so that merged or rounded weights need not exist twice.

    Attributes:
        quantization: type to which 16-bit weights of linear layers are rounded, as `Deployment` names it; "none" keeps
            them, and weights of a quantised checkpoint are always kept
        slots: slots for LoRA adapters of the linear layers; None without adapters
    """

    def __init__(
        self,
        spec: ModelSpec,
        state: dict[str, StoredWeight],
        dtype: torch.dtype,
        device: torch.device,
        ops: LayerOps,
        quantization: str = "none",
        slots: LoraSlots | None = None,
    ) -> None:
        self._spec, self._state, self._ops = spec, state, ops
        self._quantization = quantization if spec.checkpoint_quantization == "none" else "none"
        self._dtype, self._device = dtype, device
        self._slots = slots

    def take(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Remove the weight called `name` from `state`; return it on the device, in `dtype` or the model's type."""
        taken: torch.Tensor = self._placed(self._state.pop(name), dtype)
        return taken

    def kv_scales(self, index: int) -> tuple[float, float]:
        """Return the scales of keys and values of layer `index` for an FP8 cache; 1 if the checkpoint has none.

        Keys and values are divided by these scales.
        """
        scales = (self._state.pop(f"model.layers.{index}.self_attn.{name}", None) for name in ("k_scale", "v_scale"))
        k_scale, v_scale = (float(scale) if isinstance(scale, torch.Tensor) else 1.0 for scale in scales)
        return k_scale, v_scale

    def projection(self, modules: Sequence[str], bias: bool = False) -> Projection:
        """Return linear layers with the same input as one projection; raise UserError if their storage differs."""
        if self._slots is None:
            return self._plain_projection(modules, bias)
        shapes = [self._state[f"{module}.weight"].shape for module in modules]
        return self._slots.adapted(modules, shapes, self._plain_projection(modules, bias))

    def _plain_projection(self, modules: Sequence[str], bias: bool) -> Projection:
        added = torch.cat([self.take(f"{module}.bias") for module in modules]) if bias else None
        self._check_alike(modules)
        weight = self._rounded(modules)
        if isinstance(weight, torch.Tensor):
            return DenseProjection(weight, added)
        if isinstance(weight, Fp8Weight):
            return Fp8Projection(*weight, added)
        return self._ops.packed(weight, self._dtype, added)

    def experts(self, modules: Sequence[Sequence[str]]) -> Any:
        """Return linear layers of all experts in the form that `LayerOps.experts` takes.

        `modules` has, for each expert, the names of the layers with the same input. Raises UserError if they are stored
        differently.
        """
        self._check_alike([module for expert in modules for module in expert])
        return self._ops.expert_weights(map(self._rounded, modules), len(modules), self._dtype)

    def unrounded(self, module: str) -> torch.Tensor:
        """Return the weight `[out, in]` of a linear layer that is never rounded, such as a router, in floats."""
        weight = self._stored([module])
        return weight if isinstance(weight, torch.Tensor) else weight.dense(self._dtype)

    def _check_alike(self, modules: Sequence[str]) -> None:
        for module in modules:
            if type(self._state[f"{module}.weight"]) is not type(self._state[f"{modules[0]}.weight"]):
                remedy = f"is not stored as {modules[0]} is, though both are multiplied at once; use another checkpoint"
                raise UserError("model", module, remedy)

    def _stored(self, modules: Sequence[str]) -> Any:
        weights = [self._state.pop(f"{module}.weight") for module in modules]
        return joined([self._placed(weight) for weight in weights])

    def _rounded(self, modules: Sequence[str]) -> Any:
        """Return the merged weight of `modules`: 16-bit weights are rounded to `quantization`, others are as stored."""
        weight = self._stored(modules)
        return rounded(weight, self._quantization) if isinstance(weight, torch.Tensor) else weight

    def _placed(self, weight: StoredWeight, dtype: torch.dtype | None = None) -> Any:
        """Return the weight on the device: floats in `dtype` or the model's type, quantised weights unchanged.

        The tensors of quantised weights would lose their meaning in another type.
        """
        if isinstance(weight, torch.Tensor):
            return weight.to(device=self._device, dtype=dtype or self._dtype).contiguous()
        return each_tensor(weight, lambda part: part.to(self._device))
