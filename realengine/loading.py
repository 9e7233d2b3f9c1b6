"""From a rank's weights by name to what multiplies: each is taken once, merged, converted or rounded.

Linear layers that are multiplied at once must be stored alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from realengine.layer_ops import LayerOps
from realengine.projection import DenseProjection, Fp8Projection, Projection, quantised
from realengine.stored_weight import Fp8Weight, StoredWeight, each_tensor, joined, quantise
from serving.deployments.model_spec import ModelSpec
from serving.errors import UserError

QUANTIZATIONS = ("none", "fp8", "int4", "int8")  # what 16-bit weights can be rounded to


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
        state: dict[str, StoredWeight],
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
        taken: torch.Tensor = self._placed(self._state.pop(name), dtype)
        return taken

    def kv_scales(self, index: int) -> tuple[float, float]:
        """What keys and values of layer `index` are divided by in an FP8 cache; 1 if the checkpoint has no scales."""
        found = (self._state.pop(f"model.layers.{index}.self_attn.{name}", None) for name in ("k_scale", "v_scale"))
        k_scale, v_scale = (float(scale) if isinstance(scale, torch.Tensor) else 1.0 for scale in found)
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

    def _check_alike(self, modules: Sequence[str]) -> None:
        for module in modules:
            if type(self._state[f"{module}.weight"]) is not type(self._state[f"{modules[0]}.weight"]):
                remedy = f"is not stored as {modules[0]} is, though both are multiplied at once; use another checkpoint"
                raise UserError("model", module, remedy)

    def _stored(self, modules: Sequence[str]) -> Any:
        weights = [self._state.pop(f"{module}.weight") for module in modules]
        return joined([self._placed(weight) for weight in weights])

    def _rounded(self, modules: Sequence[str]) -> Any:
        """As it is stored, or 16 bits as `quantization` says."""
        weight = self._stored(modules)
        return rounded(weight, self._quantization) if isinstance(weight, torch.Tensor) else weight

    def _placed(self, weight: StoredWeight, dtype: torch.dtype | None = None) -> Any:
        """On the device; floats in `dtype` or the model's type, others as they are stored: their numbers mean nothing
        in another."""
        if isinstance(weight, torch.Tensor):
            return weight.to(device=self._device, dtype=dtype or self._dtype).contiguous()
        return each_tensor(weight, lambda part: part.to(self._device))
