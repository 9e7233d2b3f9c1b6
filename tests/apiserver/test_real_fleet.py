"""Several engines behind one router, held against an engine process that says what a test has it say."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from apiserver.exchange import Exchange
from apiserver.ledger import Ledger
from apiserver.live_metrics import LiveMetrics
from apiserver.messages import About, Add, Drain, From, Hello, Output, Outputs, Row, encode, read_answer, read_request
from apiserver.real_fleet import RealFleet
from serving.deployments.config import Deployment
from sim.router import find_router

ABOUT = About("m", 100, [], "", 50, False, 16, {"num_blocks": 4, "deployment": Deployment().model_dump_json()})
REJECTED = {"tenant": "", "slo_class": "", "session": "", "turn": 0, "priority": 0, "prompt_tokens": 3}


class Said:
    """An engine's end of the wire."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.bind(address)

    def hears(self) -> Any:
        self.peer, data = self.socket.recv_multipart()
        return read_request(data)

    def says(self, message: From) -> None:
        self.socket.send_multipart([self.peer, encode(message)])


class Rows:
    """Stands for a recording."""

    goes_on = True

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.steps: list[int] = []

    def add_step(self, row: dict[str, Any]) -> None:
        self.steps.append(row["step"])

    def arrived(self, request: Any) -> None: ...

    def add_request(self, row: dict[str, Any]) -> None:
        self.requests.append(row)


class Front:
    """A fleet of one engine, and a client of it."""

    def __init__(self, context: zmq.Context[Any], folder: Path) -> None:
        self.poller = zmq.Poller()
        self.engine = Said(context, f"ipc://{folder / 'engine'}")
        self.exchange = Exchange(context, f"ipc://{folder / 'front'}")
        self.client = context.socket(zmq.DEALER)
        self.client.connect(f"ipc://{folder / 'front'}")
        router = find_router("round-robin")
        self.fleet = RealFleet(context, [f"ipc://{folder / 'engine'}"], self.exchange, router, 0)
        self.fleet.register(self.poller)
        self.poller.poll()
        self.fleet.turn()
        assert isinstance(self.engine.hears(), Hello)
        self.engine.says(ABOUT)
        self.fleet.await_all(self.poller)
        self.rows = Rows()
        self.metrics = LiveMetrics("m", 100)
        self.fleet.ledger = self.ledger = Ledger(self.fleet, self.metrics, self.rows)  # type: ignore[arg-type]

    def ask(self, their_id: int) -> int:
        """The id by which the engine was asked."""
        front = zmq.Poller()
        self.exchange.register(front)
        self.client.send(encode(Add(their_id, [1, 2, 3], 90, 0)))
        assert front.poll(5000)
        ((peer, asked),) = self.exchange.received()
        assert isinstance(asked, Add)
        id = self.exchange.open(peer, asked.id)
        self.ledger.expects(id, asked)
        self.fleet.add(id, asked)
        assert self.engine.hears().id == id
        return id

    def listens(self) -> None:
        """Until nothing is under way."""
        while self.ledger.under_way or self.fleet.engines[0].answers:
            assert self.poller.poll(5000), "the row or the refusal got lost"
            self.fleet.turn()

    def outputs(self) -> list[tuple[int, str, str]]:
        """What the client hears: its id, how it ended, and why."""
        assert self.client.poll(5000), "the client waits in vain"
        outputs = read_answer(self.client.recv())
        assert isinstance(outputs, Outputs)
        return [(output.id, output.finish, output.reason) for output in outputs.outputs]


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Front]:
    context: zmq.Context[Any] = zmq.Context()
    try:
        yield Front(context, tmp_path)
    finally:
        context.destroy(linger=0)


def test_a_client_hears_that_its_engine_rejected_its_request(front: Front) -> None:
    id = front.ask(7)
    times = {"arrival_ns": 1, "send_ns": 2, "end_ns": 3}
    row = {**REJECTED, **times, "request_id": id, "replica": 0, "output_tokens": 0}
    front.engine.says(Row("requests", {**row, "status": "rejected", "reason": "too many blocks"}))
    front.engine.says(Outputs(0, [Output(id, [], finish="refused", reason="too many blocks")]))
    front.listens()
    assert front.outputs() == [(7, "refused", "too many blocks")]


def test_what_an_engine_refuses_because_it_ends_is_over_and_it_is_asked_no_more(front: Front) -> None:
    id = front.ask(7)
    front.engine.says(Drain())
    front.engine.says(Outputs(0, [Output(id, [], finish="refused", reason="the server is about to end")]))
    front.listens()
    assert front.outputs() == [(7, "refused", "the server is about to end")]
    assert [(row["request_id"], row["status"]) for row in front.rows.requests] == [(id, "rejected")]
    assert front.fleet.refusal(8, Add(8, [1], 1, 0)) == (503, "no engine is ready")
    assert not front.metrics._lives


def test_what_is_under_way_when_the_server_ends_at_once_is_unfinished(front: Front) -> None:
    id = front.ask(7)
    front.engine.says(Outputs(0, [Output(id, [5, 6])]))
    front.poller.poll(5000)
    front.fleet.close()
    assert front.outputs() == [(7, "", "")]
    assert front.outputs() == [(7, "abort", "the server ended")]
    (row,) = front.rows.requests
    assert (row["status"], row["output_tokens"]) == ("unfinished", 2)
    assert not front.ledger.under_way and front.fleet.engines[0].events.closed


def test_steps_are_counted_on_when_an_engine_starts_again(front: Front) -> None:
    for _ in range(2):
        for number in range(3):
            front.engine.says(Row("steps", {"step": number, "row_ids": [], "row_tokens": [], "preempted_ids": []}))
        front.engine.says(ABOUT)  # from the process that takes its place
        wanted = len(front.rows.steps) + 3
        while len(front.rows.steps) < wanted:
            assert front.poller.poll(5000)
            front.fleet.turn()
        front.fleet.turn()
    assert front.rows.steps == [0, 1, 2, 3, 4, 5]
