"""A mixture of experts: a router sends each token to a few of many small MLPs, and weighs what they answer.

Choices are sorted by expert, so that each expert's rows lie together and two grouped GEMMs do the work. Nothing of this
needs the host: a GPU kernel reads where each expert's rows begin. A rank may hold a slice of every expert, or, in
expert parallelism, whole experts; either way it computes its part of every token, and the ranks' sum is the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch.nn.functional import linear

from realengine.layer_ops import LayerOps, Routing
from realengine.op_times import OpTimes
from serving.deployments.model_spec import ModelSpec


class ExpertNames(NamedTuple):
    """What a family calls the parts of a layer's mixture."""

    mixture: str
    gate: str
    up: str
    down: str

    @property
    def router(self) -> str:
        return f"{self.mixture}.gate.weight"

    def of(self, expert: int, part: str) -> str:
        """The weight of one expert's `gate`, `up` or `down`."""
        return f"{self.mixture}.experts.{expert}.{getattr(self, part)}.weight"


_NAMES = {
    "mixtral": ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3_moe": ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"),
}
MIXTURE_FAMILIES = tuple(_NAMES)


def expert_shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, int]]]:
    """Name, within a layer, and shape of every weight of its mixture."""
    names, hidden, inter = _NAMES[spec.family], spec.hidden_size, spec.moe_intermediate_size
    yield names.router, (spec.num_experts, hidden)
    for expert in range(spec.num_experts):
        yield names.of(expert, "gate"), (inter, hidden)
        yield names.of(expert, "up"), (inter, hidden)
        yield names.of(expert, "down"), (hidden, inter)


class Mixture:
    """The MLP of a layer. `get` gives its weights, once; `own` are the experts whose weights this rank has.

    `chosen` are the experts `[T, k]` of each token of the last step.
    """

    chosen: torch.Tensor
    fp8 = False

    def __init__(self, spec: ModelSpec, get: Callable[[str], torch.Tensor], own: range) -> None:
        names = _NAMES[spec.family]
        self._topk, self._normalise = spec.experts_per_token, spec.norm_topk_prob
        self._router = get(names.router)
        inter = spec.moe_intermediate_size
        self._gate_up = self._router.new_empty(len(own), 2 * inter, spec.hidden_size)
        self._down = self._router.new_empty(len(own), spec.hidden_size, inter)
        for place, expert in enumerate(own):
            self._gate_up[place, :inter] = get(names.of(expert, "gate"))
            self._gate_up[place, inter:] = get(names.of(expert, "up"))
            self._down[place] = get(names.of(expert, "down"))
        self._bounds = torch.arange(own.start, own.stop + 1, device=self._router.device)

    def __call__(self, x: torch.Tensor, ops: LayerOps, times: OpTimes) -> torch.Tensor:
        """`x` `[T, hidden]` through the experts of each token."""
        with times("router"):
            routing = self._route(x)
        with times("experts"):
            return ops.experts(x, self._gate_up, self._down, routing)

    def _route(self, x: torch.Tensor) -> Routing:
        """Softmax over all experts, then the best k; Mixtral's softmax over the best k is that, normalised."""
        shares, self.chosen = linear(x, self._router).float().softmax(-1).topk(self._topk)
        if self._normalise:
            shares = shares / shares.sum(-1, keepdim=True)
        ordered, choices = self.chosen.flatten().sort(stable=True)
        return Routing(choices, torch.searchsorted(ordered, self._bounds, out_int32=True), shares)
