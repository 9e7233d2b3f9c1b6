"""Policies that are defined by an order of requests.

They work as `vllm`, but admit requests by a rank that is fixed at arrival, and preempt in the reverse order. No two
ranks are equal, so the first request never loses its place to another, and running requests always make progress.
Running requests get their tokens in order of admission, as under `vllm`: ranks decide which requests run, not which
running requests pause.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from numbers import Real
from typing import Any

from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.policies.vllm import VllmScheduler
from tokentwin.serving.request import Request, Status
from tokentwin.serving.scheduler import OrderedQueue, WaitingQueue

Rank = tuple[float, int, int, int]


class RankedScheduler(VllmScheduler, ABC):
    """A scheduler that takes the smallest `score` first, and orders equal scores by `config.policy`.

    `config.policy` orders by arrival, or by priority and then arrival.
    """

    def __init__(self, config: SchedulerConfig, **engine: Any) -> None:
        super().__init__(config, **engine)
        self._by_priority = config.policy == "priority"
        self._ranks: dict[int, Rank] = {}

    @abstractmethod
    def score(self, request: Request) -> float:
        """Return the number by which the policy ranks `request`; called once, when the request arrives."""

    def _rank(self, request: Request) -> Rank:
        rank = self._ranks.get(request.id)
        if rank is None:
            priority = request.priority if self._by_priority else 0
            rank = self._checked_score(request), priority, request.arrived.arrival_ns, request.id
            self._ranks[request.id] = rank
        return rank

    def _checked_score(self, request: Request) -> float:
        score = self.score(request)
        if not isinstance(score, Real) or score != score:
            raise ValueError(f"score() is {score!r} for request {request.id}; it must be a number other than NaN")
        return score

    def new_queue(self) -> WaitingQueue:
        return OrderedQueue(self._rank)

    def victim(self) -> Request:
        return max(self.running.values(), key=self._rank)

    def end(self, request: Request, status: Status) -> None:
        super().end(request, status)
        del self._ranks[request.id]
