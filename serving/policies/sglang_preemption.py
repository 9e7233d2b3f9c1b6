"""SGLang's preemption by priority: which running requests give way to one that waits, if no seat is free.

It follows `PrefillAdder.preempt_to_schedule`. A running request may be preempted if its priority is worse by more than
the threshold: the worst priority first, then the one that joined the queue last. Requests are preempted until the new
request fits, by SGLang's estimate of its prompt, which is that of the last attempt to admit it.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokentwin.serving.policies.sglang_budget import PrefillBudget, output_estimate
from tokentwin.serving.request import Request


class PriorityPreemption:
    """The preemption of requests whose priority number exceeds that of another by more than `threshold`.

    Attributes:
        stuck: True if no running request may be preempted for the request that was asked about last
    """

    def __init__(self, threshold: int) -> None:
        self.stuck = False
        self._threshold = threshold
        self._joined: dict[int, int] = {}  # when each request last joined the queue
        self._joins = 0
        self._known: dict[int, int] = {}  # known tokens at the last attempt to admit each request
        self._cached: dict[int, int] = {}  # cached tokens then; none after a preemption

    def joins(self, request: Request) -> None:
        """Note that `request` joins the queue, for the first time or after a preemption."""
        self._joins += 1
        self._joined[request.id] = self._joins
        self._cached[request.id] = 0

    def tried(self, request: Request, cached: int) -> None:
        """Note an attempt to admit `request`, with `cached` cached tokens, or a step that mixes it with prompts."""
        self._known[request.id], self._cached[request.id] = request.known, cached

    def ended(self, id: int) -> None:
        for numbers in (self._joined, self._known, self._cached):
            numbers.pop(id, None)

    def victims(self, request: Request, running: Iterable[Request], budget: PrefillBudget) -> list[Request]:
        """Return the requests to preempt for `request`; none if that is not allowed or does not make enough room."""
        id = request.id
        lacks = self._known.get(id, 0) - self._cached[id] + output_estimate(request) - budget.room
        victims: list[Request] = []
        for other in sorted(running, key=lambda one: (-one.priority, -self._joined[one.id])):
            if other.priority - request.priority <= self._threshold:
                break
            victims.append(other)
            lacks -= budget.need(other)
            if lacks <= 0:
                return victims
        self.stuck = not victims
        return []
