"""API processes on the virtual clock, between clients and the gateway. A process does one piece of work at a time.

A request reaches the gateway when its prompt is tokenised, and its client has the answer when the last token is
detokenised. Pieces of work queue up, so the text of each token is later if many answers are being generated.

There is one process for all engines, or one for each engine. Then requests go to the processes in turn, since the
router has not placed them yet; the texts are made by the engine's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from simpy.events import Event, ProcessGenerator

from tokentwin.serving.front_door import FrontDoor
from tokentwin.serving.request import Request
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.workload import WorkloadRequest
from tokentwin.sim.clock import ARRIVAL, VirtualClock
from tokentwin.sim.run_log import RunSink

_CLIENTS_OWN = ("request_id", "tenant", "slo_class", "priority", "status", "reason", "prompt_tokens", "output_tokens")


class _Visit:
    """A request at the API server, from the time when its client sends it until it has left and its row is written.

    `texts_ns` holds the time of the text of each of its tokens.
    """

    __slots__ = ("ends", "left", "process", "received_ns", "sent_ns", "texts_ns")

    def __init__(self, sent_ns: int, received_ns: int, left: Event, process: int) -> None:
        self.sent_ns = sent_ns
        self.received_ns = received_ns
        self.left = left  # event: event that happens when the request has left the gateway
        self.process = process  # number of the process that tokenises its prompt
        self.texts_ns: list[int] = []
        self.ends = 0


class ApiServer:
    """A server that gives clients' requests to `offer` and calls `on_answered` when a client has its answer.

    It is also the sink of the run's rows: it adds its own times of each request, and passes the rows on to `sink`; if
    the `times` were learnt, rows have the times that clients see instead. The sink `clients`, if there is one, gets the
    rows as clients see them, as `tokentwin bench --url` would record them. `processes` returns the number of processes,
    and `ranks` replicas share one.
    """

    def __init__(
        self,
        clock: VirtualClock,
        times: FrontDoor,
        sink: RunSink,
        clients: RunSink | None,
        on_answered: Callable[[WorkloadRequest], None],
        processes: Callable[[], int] = lambda: 1,
        ranks: int = 1,
    ) -> None:
        self._clock = clock
        self._times = times
        self._sink = sink
        self._clients = clients
        self._on_answered = on_answered
        self._offer: Callable[[WorkloadRequest], None]
        self._visits: dict[int, _Visit] = {}
        self._processes = processes
        self._ranks = ranks
        self._free_ns: dict[int, float] = {}  # by process, time at which it has done all its work
        self._sent = 0
        self.under_way = 0

    def open(self, offer: Callable[[WorkloadRequest], None]) -> None:
        """Send requests to `offer` from now on."""
        self._offer = offer

    def send(self, request: WorkloadRequest) -> None:
        """Let a client send `request` now."""
        self.under_way += 1
        now = self._clock.now_ns
        process = self._sent % self._processes() if self._times.own_processes else 0
        self._sent += 1
        received_ns = now + round(self._times.client_ns)
        visit = self._visits[request.id] = _Visit(now, received_ns, self._clock.event(), process)
        self._clock.start(self._serve(request, visit))

    def _serve(self, request: WorkloadRequest, visit: _Visit) -> ProcessGenerator:
        clock, times = self._clock, self._times
        yield clock.until(visit.received_ns, ARRIVAL)
        work_ns = times.request_ns + times.prompt_token_ns * request.prompt_len
        yield clock.until(self._done(visit.process, clock.now_ns, work_ns), ARRIVAL)
        self._offer(request)
        yield visit.left
        answered_ns = clock.now_ns
        if not times.queues_texts:
            answered_ns += round(times.outputs_ns) + round(times.last_ns)
        elif visit.texts_ns:
            answered_ns = visit.texts_ns[-1] + round(times.last_ns)
        yield clock.until(answered_ns, ARRIVAL)
        self.under_way -= 1
        self._on_answered(request)

    def sampled(self, replica: int, plan: StepPlan, requests: list[Request], now_ns: int) -> None:
        """Detokenise the tokens that a step sampled for `requests`; see `tokentwin.sim.run_log.TokenObserver`."""
        process = replica // self._ranks if self._times.own_processes else 0
        visits, chunk_ns = self._visits, self._times.chunk_ns
        free_ns = self._free_ns.get(process, 0.0)
        done_ns = max(free_ns, now_ns + self._times.outputs_ns)
        for request in requests:
            if (visit := visits.get(request.id)) is None:
                continue  # the request was given up meanwhile
            texts_ns = visit.texts_ns
            if (new := request.outputs - len(texts_ns)) > 0:
                done_ns = free_ns = done_ns + chunk_ns
                text_ns = round(done_ns)
                texts_ns += [text_ns] * new if new > 1 else (text_ns,)
        self._free_ns[process] = free_ns

    def _done(self, process: int, from_ns: float, work_ns: float) -> int:
        """Queue work that can begin at `from_ns` and takes `work_ns`; return the time at which it is done."""
        done_ns = self._free_ns[process] = max(self._free_ns.get(process, 0.0), from_ns) + work_ns
        return round(done_ns)

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
        times = {} if self._times.learnt else self._served(visits, done)
        if self._clients is not None or self._times.learnt:
            seen = self._seen(columns, visits, done)
            if self._clients is not None:
                self._clients.add_requests({**{name: columns[name] for name in _CLIENTS_OWN}, **seen})
            if self._times.learnt:
                kept = isinstance(columns["token_times_ns"], pa.Array)
                times = seen if kept else {**seen, "token_times_ns": columns["token_times_ns"]}
        self._sink.add_requests({**columns, **times})

    def _served(self, visits: Sequence[_Visit], done: Sequence[bool]) -> dict[str, Sequence[Any]]:
        """Return the server's own times of requests; `done` are those that finished."""
        last_ns, client_ns = round(self._times.last_ns), round(self._times.client_ns)

        def texts(at: int, later_ns: int = 0) -> list[int | None]:
            return [visit.texts_ns[at] + later_ns if ok else None for visit, ok in zip(visits, done, strict=True)]

        return {
            "received_ns": [visit.received_ns for visit in visits],
            "first_text_ns": texts(0),
            "first_sent_ns": texts(0),
            "last_text_ns": texts(-1),
            "last_sent_ns": texts(-1, last_ns),
            # clients have their answer before the request ends here
            "client_ns": [client_ns - last_ns if ok else None for ok in done],
        }

    def _seen(
        self, columns: Mapping[str, Sequence[Any]], visits: Sequence[_Visit], done: Sequence[bool]
    ) -> dict[str, Sequence[Any]]:
        """Return the times of requests that clients see."""
        sent = {name: [visit.sent_ns for visit in visits] for name in ("arrival_ns", "send_ns")}
        if not self._times.queues_texts:
            later_ns = round(self._times.outputs_ns)
            late = ("first_token_ns", "finish_ns", "end_ns")
            moved: dict[str, Sequence[Any]] = {name: [ns and ns + later_ns for ns in columns[name]] for name in late}
            times = columns["token_times_ns"]
            if isinstance(times, pa.Array):
                times = pa.ListArray.from_arrays(times.offsets, pc.add(times.values, later_ns), mask=times.is_null())
            return {**sent, **moved, "token_times_ns": times}
        return {
            **sent,
            "first_token_ns": [visit.texts_ns[0] if visit.texts_ns else None for visit in visits],
            "finish_ns": [visit.texts_ns[-1] if ok else None for visit, ok in zip(visits, done, strict=True)],
            "token_times_ns": [visit.texts_ns for visit in visits],
            "end_ns": [max([end, *v.texts_ns[-1:]]) for end, v in zip(columns["end_ns"], visits, strict=True)],
        }
