"""Random experts, tokens and choices for them: what the kernels of a mixture are checked on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from realengine.gpu_suite.ragged_batch import Numbers
from realengine.layer_ops import LayerOps, Routing
from realengine.loading import rounded


class Mixture(NamedTuple):
    """The sizes of a layer's experts: `inner` of one, how many there are, how many a token goes to; and what their
    weights are rounded to, as `Deployment` names it."""

    hidden: int
    inner: int
    experts: int
    topk: int
    quantization: str = "none"


class ExpertBatch:
    """`tokens` tokens and the experts of `mixture` for `ops`; the first `others` of them belong to another rank."""

    def __init__(
        self, mixture: Mixture, tokens: int, dtype: torch.dtype, numbers: Numbers, ops: LayerOps, others: int
    ) -> None:
        hidden, inner, experts, topk, quantization = mixture
        self._ops = ops
        self._first = others
        own = experts - self._first
        self._x = numbers(tokens, hidden, dtype=dtype)
        self._stored = []
        for shape in ((2 * inner, hidden), (hidden, inner)):
            drawn = (numbers(*shape, dtype=dtype, scale=shape[1] ** -0.5) for _ in range(own))
            self._stored.append([rounded(weight, quantization) for weight in drawn])
        self._weights = [ops.expert_weights(stored, own, dtype) for stored in self._stored]
        shares, self._chosen = numbers(tokens, experts, dtype=torch.float32).softmax(-1).topk(topk)
        ordered, choices = self._chosen.flatten().sort(stable=True)
        bounds = torch.arange(self._first, experts + 1, device=shares.device)
        self._routing = Routing(choices, torch.searchsorted(ordered, bounds, out_int32=True), shares)

    def run(self) -> Tensor:
        """What `ops` make of it, `[tokens, hidden]`."""
        return self._ops.experts(self._x, *self._weights, self._routing)

    def expected(self) -> Tensor:
        """The same in float64, from the definition, expert by expert."""
        x, shares = self._x.double(), self._routing.shares.double()
        out = torch.zeros_like(x)
        for place, stored in enumerate(zip(*self._stored, strict=True)):
            gate_up, down = (each if isinstance(each, Tensor) else each.dense(torch.float64) for each in stored)
            tokens, number = (self._chosen == self._first + place).nonzero(as_tuple=True)
            gate, up = (x[tokens] @ gate_up.double().T).chunk(2, dim=1)
            answer = (gate / (1 + (-gate).exp()) * up) @ down.double().T
            out.index_add_(0, tokens, answer * shares[tokens, number, None])
        return out
