"""The MLP of a layer: dense, or a mixture of experts (MoE).

In an MoE layer a router sends each token to a few of many small MLPs, the experts, and weights their answers. The
router's choices are sorted by expert, so that the rows of an expert are contiguous and two grouped GEMMs compute all
experts. This needs no host: a GPU kernel reads where the rows of each expert begin. A rank has a slice of every expert
or, with expert parallelism, whole experts. In both cases it computes its part of every token's output, and the output
is the sum over the ranks. A shared expert, which processes every token, is an ordinary MLP of which each rank has a
slice.

The routers of Mixtral and Qwen take the softmax over all experts. The router of DeepSeek-V3, which dots.llm1 also uses,
takes the sigmoid of each score. It chooses experts by the sigmoid plus a bias that was trained to balance the experts,
and weights the answers without the bias. Some routers first choose groups of experts (DeepSeek-V2 and V3, section 2.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.nn.functional import linear

from tokentwin.realengine.devices.device import OpTimes
from tokentwin.realengine.models.layer_ops import LayerOps, Routing, Scores
from tokentwin.realengine.models.linear import Fp8Rows
from tokentwin.realengine.models.weight_loader import WeightLoader
from tokentwin.serving.deployments.model_spec import ModelSpec

BIAS = "e_score_correction_bias"
ROUTER = ".gate.weight"  # how the name of a router's weight ends
_PARTS = ("gate", "up", "down")


class Router:
    """The router of an MoE layer, whose weights have the name `gate`; `own` are the experts of this rank.

    `chosen` `[T, k]`, integers, are the experts of each token of the last step.
    """

    chosen: torch.Tensor

    def __init__(self, spec: ModelSpec, weights: WeightLoader, gate: str, own: range) -> None:
        self._weight = weights.unrounded(gate)
        self._bias = weights.take(f"{gate}.{BIAS}", torch.float32) if spec.router_bias else None
        if spec.router_bias:  # DeepSeek computes this whole router in float32
            self._weight = self._weight.float()
        self._own = own

    def __call__(self, x: torch.Tensor, ops: LayerOps) -> Routing:
        """Return the routing of `x` `[T, hidden]`."""
        logits = linear(x.to(self._weight.dtype), self._weight)
        self.chosen, routing = ops.route(Scores(logits, self._bias, self._own))
        return routing


class MixtureNames(NamedTuple):
    """A model family's names for the parts of an MoE layer; `shared` is the expert that processes every token."""

    mixture: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = ""

    @property
    def router(self) -> str:
        return f"{self.mixture}.gate"

    def module(self, expert: int | None, part: str) -> str:
        """Return the name of a part (one of `_PARTS`) of an expert; `expert` None is the shared expert."""
        return f"{self.mixture}.{self.shared if expert is None else f'experts.{expert}'}.{getattr(self, part)}"

    @property
    def shared_gate(self) -> str:
        return f"{self.mixture}.shared_expert_gate"


_NAMES = {
    "mixtral": MixtureNames("block_sparse_moe", "w1", "w3", "w2"),
    "qwen2_moe": MixtureNames(shared="shared_expert"),
    "qwen3_moe": MixtureNames(),
    "dots1": MixtureNames(shared="shared_experts"),
}
MIXTURE_FAMILIES = tuple(_NAMES)
SHARING_FAMILIES = tuple(family for family, names in _NAMES.items() if names.shared)


def mixture_shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name within the layer and the shape of every weight of an MoE layer."""
    names, hidden = _NAMES[spec.family], spec.hidden_size
    inter, shared = spec.moe_intermediate_size, spec.shared_intermediate_size
    yield f"{names.router}.weight", (spec.num_experts, hidden)
    if spec.router_bias:
        yield f"{names.router}.{BIAS}", (spec.num_experts,)
    sizes = [*((expert, inter) for expert in range(spec.num_experts)), *([(None, shared)] if shared else [])]
    for expert, size in sizes:
        for part in _PARTS:
            yield f"{names.module(expert, part)}.weight", (hidden, size) if part == "down" else (size, hidden)
    if spec.shared_gate:
        yield f"{names.shared_gate}.weight", (1, hidden)


class DenseMlp:
    """SwiGLU (Shazeer 2020), with gate and up in one GEMM. `weights` gives the weights of the named modules."""

    def __init__(self, weights: WeightLoader, gate: str, up: str, down: str) -> None:
        self._gate_up, self._down = weights.projection([gate, up]), weights.projection([down])
        self.fp8 = self._gate_up.fp8

    def __call__(self, x: torch.Tensor | Fp8Rows, ops: LayerOps, times: OpTimes) -> torch.Tensor:
        """Return the MLP of `x`, both `[T, hidden]`."""
        with times("gate_up"):
            gate_up = self._gate_up(x)
        with times("silu_mul"):
            product = ops.silu_mul(gate_up, self._down.fp8)
        with times("down"):
            return self._down(product)


class Mixture:
    """The MoE of layer `index`, which takes its weights out of `weights`; `own` are the experts of this rank."""

    fp8 = False

    def __init__(self, spec: ModelSpec, weights: WeightLoader, index: int, own: range) -> None:
        names, at = _NAMES[spec.family], f"model.layers.{index}."
        self._route = Router(spec, weights, at + names.router, own)
        self._shared = None
        if spec.shared_intermediate_size:
            self._shared = DenseMlp(weights, *(at + names.module(None, part) for part in _PARTS))
        self._shared_gate = weights.unrounded(at + names.shared_gate) if spec.shared_gate else None
        self._gate_up = weights.experts([[at + names.module(e, part) for part in ("gate", "up")] for e in own])
        self._down = weights.experts([[at + names.module(e, "down")] for e in own])

    @property
    def chosen(self) -> torch.Tensor:
        """The indices `[T, k]` of the experts of each token of the last step."""
        return self._route.chosen

    def __call__(self, x: torch.Tensor, ops: LayerOps, times: OpTimes) -> torch.Tensor:
        """Return the MoE output for `x`, both `[T, hidden]`."""
        with times("router"):
            routing = self._route(x, ops)
        with times("experts"):
            out = ops.experts(x, self._gate_up, self._down, routing)
        if self._shared is None:
            return out
        shared = self._shared(x, ops, times)
        with times("shared"):
            if self._shared_gate is not None:
                shared = shared * linear(x, self._shared_gate).sigmoid()
            return out + shared
