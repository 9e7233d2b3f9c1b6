"""The gateway handles a request from its arrival to its end: routing, refusals, retries, and users who give up.

`Arrivals` offers each request of the clients when it is due. A request leaves in one of four ways: finished, rejected,
timed out in a queue, or cancelled. No request ever disappears. The requests of a crashed replica start again at once on
other replicas. While no replica is ready, requests wait in the gateway if a replica is starting.

A decode replica takes a request over from a prefill replica when its first token is there. The prefill replica keeps
the KV of the prompt until the decode replica has it; if this KV is lost, the request starts again, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from random import Random

from simpy.events import ProcessGenerator

from tokentwin.serving.clients import Clients
from tokentwin.serving.deployments.fleet import AdmissionConfig, Patience, Retry
from tokentwin.serving.request import Request, Status
from tokentwin.serving.workload import STOPPED, WorkloadRequest
from tokentwin.sim.clock import ARRIVAL, TRANSFER_ENDS, Alarm, VirtualClock, from_seconds
from tokentwin.sim.encoder_pools import EncoderPools
from tokentwin.sim.fleet import Fleet, Life
from tokentwin.sim.kv_reservations import KvReservations
from tokentwin.sim.kv_transfers import KvTransfers
from tokentwin.sim.replica import Replica
from tokentwin.sim.run_log import RunLog


class Arrivals:
    """An alarm at which the next request of `clients` is due; then all that are due are offered."""

    def __init__(self, clock: VirtualClock, clients: Clients, offer: Callable[[WorkloadRequest], None]) -> None:
        self._clock = clock
        self._clients = clients
        self._offer = offer
        self._alarm: Alarm | None = None
        self._alarm_ns = 0
        self._await(clients.next_ns)

    @property
    def exhausted(self) -> bool:
        """True once every request of the workload has been offered."""
        return self._clients.exhausted

    def ended(self, request: WorkloadRequest) -> None:
        """Record that `request` leaves now, which may make another request due."""
        self._clients.ended(request, self._clock.now_ns)
        self._await(self._clients.next_ns)

    def _await(self, next_ns: int | None) -> None:
        if next_ns is None or (self._alarm is not None and self._alarm_ns <= next_ns):
            return
        now_ns = self._clock.now_ns
        self._alarm_ns = next_ns if next_ns > now_ns else now_ns
        self._alarm = Alarm(self._clock, self._alarm_ns, ARRIVAL, self._arrive)

    def _arrive(self, alarm: Alarm) -> None:
        if alarm is not self._alarm:
            return
        clients, now_ns = self._clients, self._clock.now_ns
        while (next_ns := clients.next_ns) is not None and next_ns <= now_ns:
            self._offer(clients.pop())
        self._alarm = None
        self._await(next_ns)


class _Visit:
    """A request that has not left. `replica` and `live` are None while it is on no replica.

    `taken_over` is True if a decode replica has taken it over from a prefill replica.
    """

    __slots__ = ("arrival_ns", "attempts", "live", "replica", "request", "taken_over")

    def __init__(self, request: WorkloadRequest, arrival_ns: int) -> None:
        self.request = request
        self.arrival_ns = arrival_ns
        self.attempts = 0
        self.replica: Replica | None = None
        self.live: Request | None = None
        self.taken_over = False


class Gateway:
    """The gateway of a fleet. `on_end` is called with each request that has left."""

    def __init__(
        self,
        clock: VirtualClock,
        log: RunLog,
        admission: AdmissionConfig,
        on_end: Callable[[WorkloadRequest], None],
    ) -> None:
        self._clock = clock
        self._log = log
        self._on_end = on_end
        self._visits: dict[int, _Visit] = {}
        self._unplaced: deque[_Visit] = deque()  # visits for which no replica is ready
        self._prefilled: deque[tuple[_Visit, Request]] = deque()  # visits for which no decode replica is ready
        self._reserved: deque[tuple[_Visit, Request]] = deque()  # visits for which no prefill replica is ready
        self._most_at_replica = admission.max_queued_per_replica
        self._most = admission.max_queued
        self._limited = self._most_at_replica is not None or self._most is not None
        self._timeout_ns = None if admission.queue_timeout_s is None else from_seconds(admission.queue_timeout_s)
        self._patience = admission.patience
        self._retry = admission.retry

    def open(self, fleet: Fleet, transfers: KvTransfers | None = None, encoders: EncoderPools | None = None) -> None:
        """Send requests to `fleet` from now on.

        `fleet` calls `ended` and `lost`; `transfers` calls `prefilled` or `reserved`; `encoders` calls `encoded` or
        `not_encoded`.
        """
        self._fleet = fleet
        self._transfers = transfers
        self._encoders = encoders
        fleet.on_ready.append(self._ready)

    def __len__(self) -> int:
        """Return the number of requests that have not left: queued, running, or between two attempts."""
        return len(self._visits)

    def offer(self, request: WorkloadRequest) -> None:
        """Take `request`, which arrives now."""
        visit = self._visits[request.id] = _Visit(request, self._clock.now_ns)
        if self._patience is not None:
            self._clock.start(self._lose_patience(visit, self._patience))
        if request.leaves_ns is not None:
            self._clock.start(self._hang_up(request, request.leaves_ns))
        self._attempt(visit)

    def open_requests(self) -> list[int]:
        """Return the ids of requests that have not left, in the order in which they came."""
        return list(self._visits)

    def gives(self, live: Request) -> bool:
        """Return whether users get the tokens of `live`, an attempt at a request that has not left."""
        return self._transfers is None or self._transfers.gives(live, self._visits[live.id].request)

    def give_up(self, id: int, status: str, reason: str) -> None:
        """End request `id`, because its client wants no more tokens, unless it has left already.

        A request that has no token, for example because its replica crashed, ends as `cancelled` instead of `finished`.
        """
        if (visit := self._visits.get(id)) is not None:
            if status == Status.FINISHED.value and (visit.live is None or not self._got(visit.live)):
                status = "cancelled"
            if visit in self._unplaced:
                self._unplaced.remove(visit)
            self._leave(visit, status, reason)

    # Called by the fleet

    def ended(self, request: Request) -> None:
        """Let `request` leave, because it has finished or can never fit."""
        visit = self._visits[request.id]
        if visit.live is not None and not visit.live.ended and visit.replica is not None:
            visit.replica.withdraw(visit.live)  # its prompt can never fit on a prefill replica
        self._left(request.truth)

    def prefilled(self, request: Request) -> None:
        """Let a decode replica take `request` over from the prefill replica that has its first token and its KV."""
        self._clock.start(self._hand_over(self._visits[request.id], request))

    def reserved(self, request: Request) -> None:
        """Let a prefill replica compute the prompt of `request`, which has KV blocks on a decode replica."""
        self._clock.start(self._begin_prefill(self._visits[request.id], request))

    def encoded(self, id: int) -> None:
        """Route request `id`, whose images are encoded."""
        self._clock.start(self._place_encoded(self._visits[id]))

    def not_encoded(self, id: int, reason: str) -> None:
        """Reject request `id`, because its images cannot be encoded."""
        self._leave(self._visits[id], "rejected", reason)

    def lost(self, requests: Sequence[Request]) -> None:
        """Start `requests` again, because their replica crashed."""
        for request in requests:
            visit = self._visits[request.id]
            self._take_off(visit)
            self._attempt(visit)

    def _ready(self, life: Life) -> None:
        unplaced, self._unplaced = self._unplaced, deque()
        for visit in unplaced:
            self._place(visit)
        prefilled, self._prefilled = self._prefilled, deque()
        for visit, request in prefilled:
            self._take_over(visit, request)
        reserved, self._reserved = self._reserved, deque()
        for visit, request in reserved:
            self._prefill(visit, request)

    # Attempts

    def _attempt(self, visit: _Visit) -> None:
        visit.attempts += 1
        if self._timeout_ns is not None:
            self._clock.start(self._time_out(visit, visit.attempts, self._timeout_ns))
        self._place(visit)

    def _place_encoded(self, visit: _Visit) -> ProcessGenerator:
        """Route a request after all steps that end now have ended, because routers may look at loads."""
        attempt = visit.attempts
        yield self._clock.until(self._clock.now_ns, TRANSFER_ENDS)
        if self._visits.get(visit.request.id) is visit and visit.attempts == attempt and visit.live is None:
            self._place(visit)

    def _place(self, visit: _Visit) -> None:
        if self._encoders is not None and self._encoders.must_encode(visit.request):
            if self._limited and (refusal := self._refusal(None)):
                self._failed(visit, "rejected", refusal)
            else:
                self._encoders.begin(visit.request)
            return
        replica = self._fleet.route(visit.request)
        refusal = self._refusal(replica) if self._limited else ""
        if replica is None and not refusal:
            if self._fleet.awaits(visit.request):
                self._unplaced.append(visit)
                return
            refusal = "no replica is left"
        if refusal:
            self._failed(visit, "rejected", refusal)
        elif replica is not None:
            visit.replica = replica
            offered = self._fleet.offered_to(replica, visit.request)
            outputs = 0
            if self._transfers is not None and self._transfers.begins_at_decode(visit.request):
                outputs = 1  # a prefill replica will sample the first token
            visit.live = live = replica.offer(offered, visit.arrival_ns, visit.attempts, outputs)
            if self._encoders is not None and not outputs:
                self._send_embeddings(live, replica)

    def _send_embeddings(self, live: Request, replica: Replica) -> None:
        """Send the embeddings of `live` to `replica`, which prefills it."""
        if self._encoders is not None and live.arrived.items and not live.ended:
            self._encoders.send(live, replica)

    def _hand_over(self, visit: _Visit, request: Request) -> ProcessGenerator:
        """Let `request` be taken over after all steps that end now have ended, because routers may look at loads."""
        yield self._clock.until(self._clock.now_ns, TRANSFER_ENDS)
        self._take_over(visit, request)

    def _take_over(self, visit: _Visit, request: Request) -> None:
        if visit.live is not request or self._visits.get(request.id) is not visit:
            return  # the request was lost or given up meanwhile
        replica = self._fleet.route_decode(visit.request)
        if replica is not None:
            visit.replica, visit.taken_over = replica, True
            visit.live = replica.take_over(visit.request, request, self._got(request))
        elif self._fleet.awaits_decode(visit.request):
            self._prefilled.append((visit, request))
        else:
            self._leave(visit, "rejected", "no decode replica is left")

    def _begin_prefill(self, visit: _Visit, request: Request) -> ProcessGenerator:
        """Begin the prefill after all steps that end now have ended, because routers may look at loads."""
        yield self._clock.until(self._clock.now_ns, TRANSFER_ENDS)
        self._prefill(visit, request)

    def _prefill(self, visit: _Visit, request: Request) -> None:
        if visit.live is not request or self._visits.get(request.id) is not visit:
            return  # the request was lost or given up meanwhile
        assert isinstance(self._transfers, KvReservations)
        replica = self._fleet.route_prefill(visit.request)
        if replica is not None:
            self._send_embeddings(self._transfers.prefill(visit.request, replica), replica)
        elif self._fleet.awaits_prefill(visit.request):
            self._reserved.append((visit, request))
        else:
            self._leave(visit, "rejected", "no prefill replica is left")

    def _got(self, live: Request) -> int:
        """Return the number of output tokens that the user has got; users may not see a prefill replica's token."""
        return live.outputs if self.gives(live) else 0

    def _refusal(self, replica: Replica | None) -> str:
        """Return why no request can be queued now; empty if a request can be queued."""
        encoding = 0 if self._encoders is None else self._encoders.waiting
        if self._most is not None and self._log.queued + len(self._unplaced) + encoding >= self._most:
            return f"{self._most} requests were queued in the fleet"
        if replica and self._most_at_replica is not None and replica.queued_requests >= self._most_at_replica:
            return f"{self._most_at_replica} requests were queued at its replica"
        return ""

    def _failed(self, visit: _Visit, status: str, reason: str) -> None:
        """End an attempt that failed; start another one after a wait, or let the request leave."""
        request = visit.request
        if visit.attempts < self._retry.max_attempts:
            self._clock.start(self._try_again(visit, from_seconds(backoff_s(self._retry, request.id, visit.attempts))))
        else:
            self._leave(visit, status, reason)

    def _try_again(self, visit: _Visit, backoff_ns: int) -> ProcessGenerator:
        yield self._clock.until(self._clock.now_ns + backoff_ns, ARRIVAL)
        if self._visits.get(visit.request.id) is visit:
            self._attempt(visit)

    # Giving up

    def _time_out(self, visit: _Visit, attempt: int, timeout_ns: int) -> ProcessGenerator:
        """End attempt number `attempt` if it is still queued after `timeout_ns`."""
        yield self._clock.until(self._clock.now_ns + timeout_ns, ARRIVAL)
        id = visit.request.id
        if self._visits.get(id) is not visit or visit.attempts != attempt:
            return
        if self._encoders is not None and visit.request.items:
            if self._encoders.has_begun(id) or self._encoders.must_encode(visit.request):
                return  # it is encoded, or it was refused and waits for its next attempt
            self._encoders.drop(id)
        elif visit.live is not None:
            if (
                visit.live.admitted >= 0
                or visit.taken_over
                or (self._transfers is not None and self._transfers.has_begun(id))
            ):
                return
            self._take_off(visit)
        elif visit in self._unplaced:
            self._unplaced.remove(visit)
        else:
            return  # the attempt was refused, and the request waits for its next attempt
        self._failed(visit, "timed_out", f"waited {timeout_ns / 1e9:g} s in the queue")

    def _hang_up(self, request: WorkloadRequest, at_ns: int) -> ProcessGenerator:
        yield self._clock.until(at_ns, ARRIVAL)
        if request.stop_ns is None:
            self.give_up(request.id, "cancelled", "its client hung up")
        else:
            self.give_up(request.id, "finished", STOPPED)

    def _lose_patience(self, visit: _Visit, patience: Patience) -> ProcessGenerator:
        yield self._clock.until(self._clock.now_ns + from_seconds(patience_s(patience, visit.request.id)), ARRIVAL)
        if self._visits.get(visit.request.id) is not visit:
            return
        live, now = visit.live, self._clock.now_ns
        if live is not None and patience.until == "first-token" and self._got(live):
            return
        self.give_up(visit.request.id, "cancelled", f"its user gave up after {(now - visit.arrival_ns) / 1e9:.3g} s")

    # Leaving

    def _take_off(self, visit: _Visit) -> None:
        """Remove the request from its replica."""
        assert visit.replica is not None and visit.live is not None
        if not visit.live.ended:
            visit.replica.withdraw(visit.live)
        self._drop(visit.request.id)
        self._log.withdrawn(visit.live, self._clock.now_ns)
        visit.replica = visit.live = None
        visit.taken_over = False

    def _leave(self, visit: _Visit, status: str, reason: str) -> None:
        now = self._clock.now_ns
        if visit.replica is not None and visit.live is not None:
            if not visit.live.ended:
                visit.replica.withdraw(visit.live)
            self._log.ended(visit.live, now, status, reason)
        else:
            self._log.refused(visit.request, visit.arrival_ns, now, status, reason, visit.attempts)
        self._left(visit.request)

    def _left(self, request: WorkloadRequest) -> None:
        if self._transfers is not None or self._encoders is not None:
            self._drop(request.id)
        del self._visits[request.id]
        self._on_end(request)

    def _drop(self, id: int) -> None:
        """Stop what is done for a request outside its replica."""
        if self._transfers is not None:
            self._transfers.drop(id)
        if self._encoders is not None:
            self._encoders.drop(id)


def patience_s(patience: Patience, id: int) -> float:
    """Return how long the user of request `id` waits."""
    if patience.distribution == "constant":
        return patience.mean_s
    return Random(f"{patience.seed}:{id}").expovariate(1 / patience.mean_s)


def backoff_s(retry: Retry, id: int, attempts: int) -> float:
    """Return how long the client of request `id` waits after its attempt number `attempts`, from 1."""
    whole = min(retry.backoff_s * retry.factor ** (attempts - 1), retry.max_backoff_s)
    return whole * (1 - retry.jitter * Random(f"{retry.seed}:{id}:{attempts}").random())
