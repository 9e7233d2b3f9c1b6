"""Tensors of a quantised checkpoint, taken out by module and part, as a reader needs them."""

from __future__ import annotations

from typing import Any

import torch

from realengine.stored_weight import PackedWeight
from serving.errors import UserError


class CheckpointTensors:
    """The tensors `state` by Hugging Face names, which a reader turns in place into the layout of `WeightLoader`."""

    def __init__(self, state: dict[str, Any], where: str) -> None:
        self.state, self._where = state, where

    def modules(self, part: str) -> list[str]:
        """Return the linear layers that have a tensor called `part`, such as `qweight`."""
        return [name.removesuffix(f".{part}") for name in self.state if name.endswith(f".{part}")]

    def take(self, module: str, part: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Take out a tensor; raise UserError if it is missing, or of another type than `dtype`."""
        tensor: torch.Tensor | None = self.state.pop(f"{module}.{part}", None)
        if tensor is None:
            raise self.fault(f"has no weight {module}.{part}; is the folder complete?")
        if dtype is not None and tensor.dtype != dtype:
            raise self.fault(f"{module}.{part} is {tensor.dtype}, but must be {dtype}; use another checkpoint")
        return tensor

    def drop(self, module: str, *parts: str) -> None:
        """Drop tensors that are not needed."""
        for part in parts:
            self.state.pop(f"{module}.{part}", None)

    def check_order(self, module: str, part: str, inputs: int, group: int) -> None:
        """Refuse inputs that were put into groups in another order than their own, as `desc_act` and `actorder` do."""
        order = self.state.pop(f"{module}.{part}", None)
        if order is not None and not torch.equal(order.long(), torch.arange(inputs) // (group or inputs)):
            remedy = "puts inputs into groups by their activations; use a checkpoint without desc_act or actorder group"
            raise self.fault(f"{module}.{part} {remedy}")

    def give(self, module: str, weight: PackedWeight) -> None:
        """Store the weight of a module; raise UserError if scales or zero points do not have its groups' shape."""
        weight = weight._replace(group=weight.group or weight.inputs)
        groups = (weight.shape[0], -(-weight.inputs // weight.group))
        for part in (weight.scale, weight.zero):
            if part is not None and part.shape != groups:
                remedy = f"has scales or zero points of shape {tuple(part.shape)}, but its groups are {groups}"
                raise self.fault(f"{module} {remedy}; use another checkpoint")
        self.state[f"{module}.weight"] = weight

    def fault(self, what: str) -> UserError:
        return UserError("model", self._where, what)
