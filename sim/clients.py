"""Who sends the requests of a workload: an open loop, a closed loop, and conversations whose users read and think."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from serving.errors import UserError
from serving.workload import Workload, WorkloadRequest
from sim.clock import ARRIVAL, Alarm, VirtualClock


class Clients:
    """Release the requests of `workload` in order, one at a time, `concurrency` of them outstanding in a closed loop.

    offered_ns  by id, when each request reaches its replica, where that is not its arrival
    exhausted   whether all of them have been released
    """

    def __init__(
        self,
        clock: VirtualClock,
        workload: Workload,
        offered_ns: Mapping[int, int] | None,
        offer: Callable[[WorkloadRequest], None],
    ) -> None:
        self._clock = clock
        self._requests = iter(workload.requests)
        self._concurrency = workload.concurrency
        self._offered_ns = offered_ns
        self._offer = offer
        self._to_come = 0  # taken from the workload, not released yet
        self._dry = False
        self._last_turn: dict[str, int] = {}  # of each session, taken from the workload
        self._answered_ns: dict[tuple[str, int], int] = {}  # turns of which the next has not been due yet
        self._unanswered: dict[tuple[str, int], WorkloadRequest] = {}  # turns that wait for the end of this one

    def start(self) -> None:
        for _ in range(self._concurrency or 1):
            self._take()

    @property
    def exhausted(self) -> bool:
        return self._dry and not self._to_come

    def ended(self, request: WorkloadRequest) -> None:
        """`request` has left, answered or not."""
        if request.session:
            turn = request.session, request.turn
            following = self._unanswered.pop(turn, None)
            if following is None:
                self._answered_ns[turn] = self._clock.now_ns
            else:
                self._release_at(self._clock.now_ns + (following.think_ns or 0), following)
        if self._concurrency is not None:
            self._take()

    def _take(self) -> None:
        """The next request is due at its time, or now if that has passed (in a closed loop)."""
        request = next(self._requests, None)
        if request is None:
            self._dry = True
            return
        self._to_come += 1
        if request.session:
            self._follow(request)
        due_ns = request.arrival_ns if self._offered_ns is None else self._offered_ns[request.id]
        at_ns = max(self._clock.now_ns, due_ns)
        Alarm(self._clock, at_ns, ARRIVAL, lambda _: self._due(request))

    def _follow(self, request: WorkloadRequest) -> None:
        """Hold the turns of a session to their order: after one that never comes another would wait for ever."""
        expected = self._last_turn.get(request.session, -1) + 1
        if request.think_ns is not None and request.turn != expected:
            raise UserError(f"request {request.id}: turn", request.turn, f"should be {expected}, the session's next")
        self._last_turn[request.session] = request.turn

    def _due(self, request: WorkloadRequest) -> None:
        if self._concurrency is None:
            self._take()
        if request.think_ns is None or not request.turn:
            self._release(request)
            return
        before = request.session, request.turn - 1
        answered_ns = self._answered_ns.pop(before, None)
        if answered_ns is None:
            self._unanswered[before] = request
        else:
            self._release_at(max(self._clock.now_ns, answered_ns + request.think_ns), request)

    def _release_at(self, at_ns: int, request: WorkloadRequest) -> None:
        if at_ns <= self._clock.now_ns:
            self._release(request)
        else:
            Alarm(self._clock, at_ns, ARRIVAL, lambda _: self._release(request))

    def _release(self, request: WorkloadRequest) -> None:
        self._to_come -= 1
        self._offer(request)
