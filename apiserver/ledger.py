"""The ledger of a served run: it adds the API server's times to rows, counts them as metrics and records them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tokentwin.apiserver.backend import Backend
from tokentwin.apiserver.engine_messages import StepEnd
from tokentwin.apiserver.journeys import Journeys
from tokentwin.apiserver.live_metrics import LiveMetrics
from tokentwin.apiserver.messages import Add, Delivered
from tokentwin.serving.workload import WorkloadRequest
from tokentwin.traces.live_recording import LiveRecording

if TYPE_CHECKING:
    from tokentwin.apiserver.request_spans import RequestSpans


class Ledger:
    """The rows of a backend; the row of a finished request waits for the report that its answer was delivered."""

    def __init__(
        self,
        backend: Backend,
        metrics: LiveMetrics,
        recording: LiveRecording | None,
        spans: RequestSpans | None = None,
        block_size: int = 16,
    ) -> None:
        self._backend = backend
        self._metrics = metrics
        self._recording = recording
        self._spans = spans
        self._journeys = Journeys(block_size)
        self._asked: dict[int, Add] = {}
        self._ended: dict[int, dict[str, Any]] = {}  # rows of finished requests whose delivery was not reported yet
        self._delivered: dict[int, Delivered | None] = {}  # reports for requests that still run; None: never delivered
        self._run: dict[str, Any] = {}
        self.under_way = 0

    @property
    def records(self) -> bool:
        return self._recording is not None and self._recording.goes_on

    @property
    def undelivered(self) -> int:
        """The number of finished requests whose delivery has not been reported."""
        return len(self._ended)

    def expects(self, id: int, asked: Add) -> None:
        """Note a request that is about to be added to the backend."""
        self._asked[id] = asked
        received_ns = self._backend.run_ns(asked.received_ns)
        self._metrics.expects(id, received_ns)
        if asked.followed:
            self._journeys.begin(id, asked.answer_id, len(asked.prompt), received_ns)
        self.under_way += 1

    def arrived(self, request: WorkloadRequest) -> None:
        if self._recording is not None:
            self._recording.arrived(request)

    def add_request(self, **row: Any) -> None:
        self.under_way -= 1
        id = row["request_id"]
        self._metrics.request(row, self._asked[id])
        if row["status"] == "finished" and id not in self._delivered:
            self._ended[id] = row
        else:
            self._write(id, row, self._delivered.pop(id, None))

    def step_ended(self, end: StepEnd) -> None:
        self._metrics.step(end)

    def add_step(self, **row: Any) -> None:
        self._journeys.step(row)
        if self._recording is not None:
            self._recording.add_step(row)

    def delivered(self, id: int, delivered: Delivered | None) -> None:
        """Note that the client has the answer to request `id`; `delivered` is None if the answer never arrives."""
        if (row := self._ended.pop(id, None)) is not None:
            self._write(id, row, delivered)
        elif id in self._asked:
            self._delivered[id] = delivered

    def _write(self, id: int, row: dict[str, Any], delivered: Delivered | None) -> None:
        asked = self._asked.pop(id)
        row["received_ns"] = self._backend.run_ns(asked.received_ns)
        row["client_id"] = asked.client_id
        if delivered is not None:
            for name in ("first_text_ns", "first_sent_ns", "last_text_ns", "last_sent_ns"):
                row[name] = self._backend.run_ns(getattr(delivered, name))
        if self._recording is not None:
            self._recording.add_request(row)
        if self._spans is not None:
            self._spans.request(row, asked)
        self._journeys.end(row)

    def journey(self, name: str) -> bytes:
        """Return, as JSON, the trace of the request whose answer is called `name`; empty if it was not traced."""
        journey = self._journeys.find(name)
        return b"" if journey is None else msgspec.json.encode(journey)

    def over(self, **run: Any) -> None:
        """Note the columns of the dataset `runs` that are known only at the end of a run."""
        self._run = run

    def close(self) -> None:
        """Write the rows that wait for a report, and close the recording and the sender of spans."""
        for id in list(self._ended):
            self.delivered(id, None)
        if self._recording is not None:
            self._recording.close(**self._run)
        if self._spans is not None:
            self._spans.close()
