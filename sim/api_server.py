"""An API process on the virtual clock, between clients and the gateway. It does one piece of work at a time.

A request reaches the gateway when its prompt is tokenised, and its client has the answer when the last token is
detokenised. Pieces of work queue up, so the text of each token is later if many answers are being generated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from simpy.events import Event, ProcessGenerator

from serving.front_door import FrontDoor
from serving.request import Request
from serving.step_plan import StepPlan
from serving.workload import WorkloadRequest
from sim.clock import ARRIVAL, VirtualClock
from sim.run_log import RunSink

_CLIENTS_OWN = ("request_id", "tenant", "slo_class", "priority", "status", "reason", "prompt_tokens", "output_tokens")


class _Visit:
    """A request at the API server, from the time when its client sends it until it has left and its row is written.

    `texts_ns` holds the time of the text of each of its tokens.
    """

    __slots__ = ("ends", "left", "received_ns", "sent_ns", "texts_ns")

    def __init__(self, sent_ns: int, received_ns: int, left: Event) -> None:
        self.sent_ns = sent_ns
        self.received_ns = received_ns
        self.left = left  # event: event that happens when the request has left the gateway
        self.texts_ns: list[int] = []
        self.ends = 0


class ApiServer:
    """A server that gives clients' requests to `offer` and calls `on_answered` when a client has its answer.

    It is also the sink of the run's rows: it adds its own times of each request, and passes the rows on to `sink`. The
    sink `clients`, if there is one, gets the rows as clients see them, as `tokentwin bench --url` would record them.
    """

    def __init__(
        self,
        clock: VirtualClock,
        times: FrontDoor,
        sink: RunSink,
        clients: RunSink | None,
        on_answered: Callable[[WorkloadRequest], None],
    ) -> None:
        self._clock = clock
        self._times = times
        self._sink = sink
        self._clients = clients
        self._on_answered = on_answered
        self._offer: Callable[[WorkloadRequest], None]
        self._visits: dict[int, _Visit] = {}
        self._free_ns = 0.0  # time at which the process has done all its work
        self.under_way = 0

    def open(self, offer: Callable[[WorkloadRequest], None]) -> None:
        """Send requests to `offer` from now on."""
        self._offer = offer

    def send(self, request: WorkloadRequest) -> None:
        """Let a client send `request` now."""
        self.under_way += 1
        now = self._clock.now_ns
        visit = self._visits[request.id] = _Visit(now, now + round(self._times.client_ns), self._clock.event())
        self._clock.start(self._serve(request, visit))

    def _serve(self, request: WorkloadRequest, visit: _Visit) -> ProcessGenerator:
        clock, times = self._clock, self._times
        yield clock.until(visit.received_ns, ARRIVAL)
        work_ns = times.request_ns + times.prompt_token_ns * request.prompt_len
        yield clock.until(self._done(clock.now_ns, work_ns), ARRIVAL)
        self._offer(request)
        yield visit.left
        answered_ns = visit.texts_ns[-1] + round(times.last_ns) if visit.texts_ns else clock.now_ns
        yield clock.until(answered_ns, ARRIVAL)
        self.under_way -= 1
        self._on_answered(request)

    def sampled(self, replica: int, plan: StepPlan, requests: list[Request], now_ns: int) -> None:
        """Detokenise the tokens that a step sampled for `requests`; see `sim.run_log.TokenObserver`."""
        for request in requests:
            if (visit := self._visits.get(request.id)) is None:
                continue  # the request was given up meanwhile
            if (new := request.outputs - len(visit.texts_ns)) > 0:
                visit.texts_ns += [self._done(now_ns + self._times.outputs_ns, self._times.chunk_ns)] * new

    def _done(self, from_ns: float, work_ns: float) -> int:
        """Queue work that can begin at `from_ns` and takes `work_ns`; return the time at which it is done."""
        self._free_ns = max(self._free_ns, from_ns) + work_ns
        return round(self._free_ns)

    def left(self, request: WorkloadRequest) -> None:
        """Answer the client, because the gateway is done with `request`."""
        self._ending(request.id).left.succeed()

    def _ending(self, id: int) -> _Visit:
        """Return the visit of a request, and drop it at the second of its two ends.

        The ends are that the request leaves and that its row is written, in either order.
        """
        visit = self._visits[id]
        visit.ends += 1
        if visit.ends == 2:
            del self._visits[id]
        return visit

    # Rows

    def add_steps(self, columns: Mapping[str, Sequence[Any]]) -> None:
        self._sink.add_steps(columns)

    def add_requests(self, columns: Mapping[str, Sequence[Any]]) -> None:
        visits = [self._ending(id) for id in columns["request_id"]]
        done = [status == "finished" for status in columns["status"]]
        last_ns, client_ns = round(self._times.last_ns), round(self._times.client_ns)

        def texts(at: int, later_ns: int = 0) -> list[int | None]:
            return [visit.texts_ns[at] + later_ns if ok else None for visit, ok in zip(visits, done, strict=True)]

        served: dict[str, Sequence[Any]] = {
            "received_ns": [visit.received_ns for visit in visits],
            "first_text_ns": texts(0),
            "first_sent_ns": texts(0),
            "last_text_ns": texts(-1),
            "last_sent_ns": texts(-1, last_ns),
            # clients have their answer before the request ends here
            "client_ns": [client_ns - last_ns if ok else None for ok in done],
        }
        self._sink.add_requests({**columns, **served})
        if self._clients is not None:
            seen: dict[str, Sequence[Any]] = {
                "arrival_ns": [visit.sent_ns for visit in visits],
                "send_ns": [visit.sent_ns for visit in visits],
                "first_token_ns": [visit.texts_ns[0] if visit.texts_ns else None for visit in visits],
                "finish_ns": served["last_text_ns"],
                "token_times_ns": [visit.texts_ns for visit in visits],
                "end_ns": [max([end, *v.texts_ns[-1:]]) for end, v in zip(columns["end_ns"], visits, strict=True)],
            }
            self._clients.add_requests({**{name: columns[name] for name in _CLIENTS_OWN}, **seen})
