"""The clients of a workload: open and closed loops, and conversations whose users read and think.

The same clients serve the real engine and the simulator. The loop that drives them tells them the time at which a
request has ended, asks when the next request is due, and takes that request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from heapq import heappop, heappush

from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload, WorkloadRequest

_Turn = tuple[str, int]


class Clients:
    """The requests of `workload` in the order in which they become due; a closed loop has `concurrency` outstanding.

    A request that waited for another request gets the time at which it became due as its arrival time. To repeat a
    run, `offered_ns` maps the id of each request to the time at which it is due. Then no request waits for another, and
    arrival times do not change. Raises UserError if the turns of a session do not follow one another.
    """

    def __init__(self, workload: Workload, offered_ns: Mapping[int, int] | None = None) -> None:
        self._requests = iter(workload.requests)
        self._is_open = workload.concurrency is None
        self._stagger_ns = workload.stagger_ns
        self._until_ns = workload.until_ns if offered_ns is None else None
        self._free_ns = 0  # closed loop: until this time the client is busy sending another request
        self._offered_ns = offered_ns
        self._due: list[tuple[int, int, WorkloadRequest]] = []  # a heap: due time, order of taking, request
        self._taken = 0
        self._last: int | None = None  # open loop: id of the last request taken that is due by its arrival time
        self._dry = False  # True once the workload has no more requests
        self._last_turn: dict[str, int] = {}  # by session: the last turn taken from the workload
        # end time of each answered turn whose next turn was not taken from the workload yet
        self._answered_ns: dict[_Turn, int] = {}
        self._unanswered: dict[_Turn, WorkloadRequest] = {}  # requests that wait for the end of the turn in the key
        self._gone: set[str] = set()  # sessions that send no more, because the workload's time is over
        self._clients_left = workload.concurrency or 1  # closed loop: clients whose next request is not too late
        for _ in range(workload.concurrency or 1):
            self._take(0)

    @property
    def next_ns(self) -> int | None:
        """The time at which the next request is due; None if it waits for the end of another."""
        return self._due[0][0] if self._due else None

    @property
    def exhausted(self) -> bool:
        """True once every request of the workload has been popped."""
        return (self._dry or not self._clients_left) and not self._due and not self._unanswered

    def pop(self) -> WorkloadRequest:
        """Return the request that is due next. Raises IndexError while there is none."""
        at_ns, _, request = heappop(self._due)
        if request.id == self._last:
            self._take(at_ns)
        if at_ns == request.arrival_ns or self._offered_ns is not None:
            return request
        return replace(request, arrival_ns=at_ns)

    def ended(self, request: WorkloadRequest, now_ns: int) -> None:
        """Record that `request` has left, answered or not."""
        if request.session and self._offered_ns is None:
            turn = request.session, request.turn
            following = self._unanswered.pop(turn, None)
            if following is None:
                self._answered_ns[turn] = now_ns
            else:
                self._think(following, now_ns, now_ns)
        if not self._is_open:
            self._take(now_ns)

    def _sent_ns(self, due_ns: int) -> int:
        if self._is_open or self._offered_ns is not None:
            return due_ns
        sent_ns = max(due_ns, self._free_ns)
        self._free_ns = sent_ns + self._stagger_ns
        return sent_ns

    def _take(self, now_ns: int) -> None:
        """Take the next request of the workload; it is due at its arrival time, or now if that time has passed.

        A turn that follows an answer becomes due by that answer, not by its arrival time. An open loop goes on taking
        such turns until it has taken one request that becomes due by its arrival time.
        """
        while (request := next(self._requests, None)) is not None:
            sent = True
            waits = request.session and self._waits(request)
            if waits:
                before = request.session, request.turn - 1
                answered_ns = self._answered_ns.pop(before, None)
                if answered_ns is not None:
                    self._think(request, answered_ns, now_ns)
                elif request.session not in self._gone:
                    self._unanswered[before] = request
                elif not self._is_open:
                    self._clients_left -= 1
            else:
                due_ns = request.arrival_ns if self._offered_ns is None else self._offered_ns[request.id]
                sent = self._push(self._sent_ns(max(now_ns, due_ns)), request)
                self._last = request.id if self._is_open else None
            if not self._is_open or (sent and not waits):
                return
        self._dry = True

    def _waits(self, request: WorkloadRequest) -> bool:
        """Return whether `request` follows an answer. Raises UserError if it is not the next turn of its session.

        A request that skips a turn would wait forever.
        """
        expected = self._last_turn.get(request.session, -1) + 1
        if request.think_ns is not None and request.turn != expected:
            remedy = f"must be {expected}, the next turn of the session"
            raise UserError(f"request {request.id}: turn", request.turn, remedy)
        self._last_turn[request.session] = request.turn
        return request.think_ns is not None and request.turn > 0 and self._offered_ns is None

    def _think(self, request: WorkloadRequest, answered_ns: int, now_ns: int) -> None:
        self._push(max(now_ns, request.arrival_ns, answered_ns + (request.think_ns or 0)), request)

    def _push(self, at_ns: int, request: WorkloadRequest) -> bool:
        """Let `request` be due at `at_ns`. Return False if the workload is over by then, so that it is never sent."""
        if self._until_ns is not None and at_ns >= self._until_ns:
            self._gone.add(request.session)
            left: WorkloadRequest | None = request
            while left is not None:  # its later turns would wait for ever
                self._clients_left -= not self._is_open
                left = self._unanswered.pop((left.session, left.turn), None)
            return False
        heappush(self._due, (at_ns, self._taken, request))
        self._taken += 1
        return True
