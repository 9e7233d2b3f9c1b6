"""A step on its way through the device, and its results after a wait."""

from __future__ import annotations

from time import perf_counter_ns

import numpy as np
import torch
from numpy.typing import NDArray

from realengine.device import Mark, Pending
from realengine.logprob import Logprob
from realengine.op_times import Timed
from realengine.sampling import TokenLogprobs
from realengine.step_input import Layout


class Launched:
    """A step that was handed to the device.

    Times are `perf_counter_ns`, valid after `wait`; if steps are not timed, all are the time at which the wait ended.

    Attributes:
        speed: mean of the device's speed before and after it; None if it is not measured
        logits: `[S, vocab]`, masked and changed, after `wait` and until the next step; None unless they are kept
    """

    def __init__(
        self,
        layout: Layout,
        tokens: torch.Tensor,
        graph: bool,
        expert_tokens: torch.Tensor | None,
    ) -> None:
        self.layout = layout
        self.graph = graph
        self.pending: Pending | None = None
        self.marks: list[Mark] = []
        self.times: Timed | None = None
        self.speed: float | None = None
        self.logits: torch.Tensor | None = None
        self.token_logprobs: TokenLogprobs | None = None
        self._tokens = tokens
        self._expert_tokens = expert_tokens
        self._seen_ns = 0

    def done(self) -> bool:
        return self.pending is not None and self.pending.done()

    def wait(self) -> list[int]:
        """Wait, and return the sampled tokens `[S]`, in the order of the layout's samples."""
        assert self.pending is not None
        self.pending.wait()
        self._seen_ns = perf_counter_ns()
        tokens: list[int] = self._tokens[: self.layout.samples].tolist()
        return tokens

    @property
    def logprobs(self) -> list[Logprob] | None:
        """The logprob of each token, beside as many others as any request wanted; valid after `wait`.

        None if no request wanted it.
        """
        return None if self.token_logprobs is None else self.token_logprobs.on_host()

    @property
    def expert_tokens(self) -> NDArray[np.int32] | None:
        """Tokens that each expert got `[layers, experts]`; None in a dense model.

        They are valid from `wait` to the third launch after.
        """
        return None if self._expert_tokens is None else self._expert_tokens.numpy()

    @property
    def start_ns(self) -> int:
        return self._passed(0)

    @property
    def computed_ns(self) -> int:
        return self._passed(1)

    @property
    def end_ns(self) -> int:
        return self._passed(2)

    @property
    def thread_ns(self) -> int | None:
        """CPU time of the thread that computed it; None if the CPU did not compute it, or steps are not timed."""
        began, *_, ended = (mark.thread_ns for mark in self.marks) if self.marks else (None, None)
        return None if began is None or ended is None else ended - began

    def _passed(self, mark: int) -> int:
        return self.marks[mark].ns() if self.marks else self._seen_ns

    @property
    def op_ns(self) -> dict[str, int] | None:
        """Device time by operation, if it was measured."""
        return self.times.totals() if self.times is not None else None
