"""One rank's share of a model's weights: Megatron's column-parallel and row-parallel split.

Heads and the MLP's inner dimension are divided; a rank computes its heads and its slice of the MLP, and what the
ranks get for the hidden state is summed. The embedding is whole on every rank, the head is divided by vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from serving.deployments.model_spec import ModelSpec
from serving.errors import UserError

_BY_ROW = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")
_BY_COLUMN = ("o_proj.weight", "down_proj.weight")
_BIASES = ("q_proj.bias", "k_proj.bias", "v_proj.bias")


def shard_spec(spec: ModelSpec, size: int) -> ModelSpec:
    """The shapes of one of `size` ranks. Raises UserError when they cannot share the model evenly."""
    for name in ("num_kv_heads", "num_heads", "intermediate_size"):
        if getattr(spec, name) % size:
            remedy = f"must divide {spec.name}'s {name}, which is {getattr(spec, name)}"
            raise UserError("tensor_parallel_size", size, remedy)
    return spec.model_copy(
        update={name: getattr(spec, name) // size for name in ("num_heads", "num_kv_heads", "intermediate_size")}
    )


def shard_state(state: Mapping[str, torch.Tensor], rank: int, size: int) -> dict[str, torch.Tensor]:
    """The weights of rank `rank`."""
    if size == 1:
        return dict(state)
    return {name: _part(name, tensor, rank, size) for name, tensor in state.items()}


def _part(name: str, tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    if name.endswith(_BY_ROW + _BIASES):
        return tensor.chunk(size, dim=0)[rank]
    if name.endswith(_BY_COLUMN):
        return tensor.chunk(size, dim=1)[rank]
    return tensor
