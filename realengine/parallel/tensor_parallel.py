"""Tensor parallelism: one rank's share of a model's weights, and its communication with the other ranks.

The split is Megatron's, column-parallel and row-parallel. The heads and the MLP's inner dimension are divided: a rank
computes its heads and its slice of the MLP, and the ranks' results are summed into the hidden state. In an MoE layer a
rank has a slice of every expert or, with expert parallelism, whole experts; a shared expert is always sliced. Every
rank has the whole embedding and router. The head is divided by vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from tokentwin.realengine.devices.device import OpTimes
from tokentwin.realengine.models.linear import FP8_BLOCK, StoredWeight, each_tensor
from tokentwin.serving.deployments.model_spec import ModelSpec
from tokentwin.serving.errors import UserError

COLLECTIVES = frozenset({"all_reduce", "all_gather"})  # operations, as `OpTimes` calls them

_BY_ROW = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3")
_BY_COLUMN = ("o_proj", "down_proj", "w2")
_EXPERT = re.compile(r"[.]experts[.](\d+)[.]")


class Collective:
    """A group of `size` ranks, as rank `rank` sees it; this base class is a group of one rank.

    Every rank makes the same calls in the same order.
    """

    rank = 0
    size = 1

    def sum(self, x: torch.Tensor, times: OpTimes) -> torch.Tensor:
        """Return the sum of `x` over the ranks, which is bitwise the same on every rank."""
        return x

    def join(self, x: torch.Tensor, times: OpTimes) -> torch.Tensor:
        """Return the `x` `[n, m]` of all ranks side by side, `[n, size * m]`."""
        return x


class DistributedGroup(Collective):
    """The default process group of torch.distributed: NCCL on CUDA, gloo on the CPU."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self._dist: Any = dist
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def sum(self, x: torch.Tensor, times: OpTimes) -> torch.Tensor:
        with times("all_reduce"):
            self._dist.all_reduce(x)
        return x

    def join(self, x: torch.Tensor, times: OpTimes) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with times("all_gather"):
            self._dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=1)


def shard_spec(spec: ModelSpec, size: int, expert_parallel: bool = False) -> ModelSpec:
    """Return the spec of one rank's share of the model; raise UserError if `size` ranks cannot share it evenly.

    With `expert_parallel` a rank has whole experts. `num_experts` stays the same, because every router knows all
    experts.
    """
    inner = []
    if spec.moe_layers < spec.num_layers:
        inner.append("intermediate_size")
    if spec.moe_layers and not expert_parallel:
        inner.append("moe_intermediate_size")
    if spec.shared_intermediate_size:
        inner.append("shared_intermediate_size")
    divided = ["num_kv_heads", "num_heads", *inner]
    for name in [*divided, *(["num_experts"] if expert_parallel else [])]:
        if getattr(spec, name) % size:
            remedy = f"must divide {spec.name}'s {name}, which is {getattr(spec, name)}"
            raise UserError("tensor_parallel_size", size, remedy)
    if size > 1 and spec.checkpoint_quantization in ("int4", "int8"):
        group = spec.checkpoint_group_size or 8  # the maximum number of integers in a word
        down = (("down_proj", getattr(spec, name)) for name in inner)
        for name, inputs in (("o_proj", spec.num_heads * spec.head_dim), *down):
            if inputs // size % group:
                remedy = f"would split a group of {group} of the {inputs} inputs of {spec.name}'s {name}"
                raise UserError("tensor_parallel_size", size, remedy)
    expert = spec.moe_intermediate_size
    blocks = spec.checkpoint_quantization == "fp8_block" and "moe_intermediate_size" in inner and expert > FP8_BLOCK
    if size > 1 and blocks and expert // size % FP8_BLOCK:
        remedy = f"would split a block of {FP8_BLOCK} of the {expert} outputs of {spec.name}'s experts"
        raise UserError("tensor_parallel_size", size, f"{remedy}; set enable_expert_parallel to true")
    return spec.model_copy(update={name: getattr(spec, name) // size for name in divided})


def own_experts(spec: ModelSpec, rank: int, size: int) -> range:
    """Return the experts of rank `rank` when each rank has whole experts."""
    experts = spec.num_experts // size
    return range(rank * experts, (rank + 1) * experts)


def shard_state(state: Mapping[str, StoredWeight], rank: int, size: int, own: range | None) -> dict[str, StoredWeight]:
    """Return the weights of rank `rank`: the whole experts `own`, or a slice of every expert if `own` is None."""
    if size == 1:
        return dict(state)
    shard: dict[str, StoredWeight] = {}
    for name, weight in state.items():
        expert = _EXPERT.search(name)
        if own is None or expert is None:
            shard[name] = _part(name, weight, rank, size)
        elif int(expert[1]) in own:
            shard[name] = weight
    return shard


def _part(name: str, weight: StoredWeight, rank: int, size: int) -> Any:
    layer = name.rpartition(".")[0]
    if layer.endswith(_BY_ROW):
        return each_tensor(weight, lambda part: part.chunk(size, dim=0)[rank])
    if layer.endswith(_BY_COLUMN):  # every rank has a scale that all inputs share
        return each_tensor(weight, lambda part: part.chunk(size, dim=1)[rank] if part.shape[1] > 1 else part)
    return weight
