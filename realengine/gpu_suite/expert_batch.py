"""Random experts, tokens and choices for them: what the kernels of a mixture are checked on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from realengine.gpu_suite.ragged_batch import Numbers
from realengine.layer_ops import LayerOps, Routing


class Mixture(NamedTuple):
    """The sizes of a layer's experts: `inner` of one, how many there are, and how many a token goes to."""

    hidden: int
    inner: int
    experts: int
    topk: int


class ExpertBatch:
    """`tokens` tokens and the experts of `mixture`; the first fifth of the experts belong to another rank."""

    def __init__(self, mixture: Mixture, tokens: int, dtype: torch.dtype, numbers: Numbers) -> None:
        hidden, inner, experts, topk = mixture
        self._first = experts // 5
        own = experts - self._first
        self._x = numbers(tokens, hidden, dtype=dtype)
        self._gate_up = numbers(own, 2 * inner, hidden, dtype=dtype, scale=hidden**-0.5)
        self._down = numbers(own, hidden, inner, dtype=dtype, scale=inner**-0.5)
        shares, self._chosen = numbers(tokens, experts, dtype=torch.float32).softmax(-1).topk(topk)
        ordered, choices = self._chosen.flatten().sort(stable=True)
        bounds = torch.arange(self._first, experts + 1, device=shares.device)
        self._routing = Routing(choices, torch.searchsorted(ordered, bounds, out_int32=True), shares)

    def run(self, ops: LayerOps) -> Tensor:
        """What `ops` make of it, `[tokens, hidden]`."""
        return ops.experts(self._x, self._gate_up, self._down, self._routing)

    def expected(self) -> Tensor:
        """The same in float64, from the definition, expert by expert."""
        x, shares = self._x.double(), self._routing.shares.double()
        out = torch.zeros_like(x)
        for place, (gate_up, down) in enumerate(zip(self._gate_up, self._down, strict=True)):
            tokens, number = (self._chosen == self._first + place).nonzero(as_tuple=True)
            gate, up = (x[tokens] @ gate_up.double().T).chunk(2, dim=1)
            answer = (gate / (1 + (-gate).exp()) * up) @ down.double().T
            out.index_add_(0, tokens, answer * shares[tokens, number, None])
        return out
