"""Several engines behind one router, with a stand-in for the engine process that sends what a test asks for."""

from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import zmq

from tokentwin.apiserver.engine_messages import Row
from tokentwin.apiserver.exchange import Exchange
from tokentwin.apiserver.ledger import Ledger
from tokentwin.apiserver.live_metrics import LiveMetrics
from tokentwin.apiserver.messages import About, Add, Output, Outputs, encode, read_answer
from tokentwin.apiserver.real_fleet import RealFleet
from tokentwin.realengine.parallel.replica_process import ReplicaProcess
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.errors import UserError
from tokentwin.serving.user_code import call_limit
from tokentwin.sim.router import find_router

ABOUT = About("m", 100, [], "", 50, False, 16, {"num_blocks": 4, "deployment": Deployment().model_dump_json()})
REJECTED = {"tenant": "", "slo_class": "", "session": "", "turn": 0, "priority": 0, "prompt_tokens": 3}


class Said(ReplicaProcess):
    """Stands for an engine process; the test is the other end of its connection."""

    def __init__(self) -> None:
        self.number = 0
        self.pipe, self.other = Pipe()

    def says(self, *messages: Any) -> None:
        self.other.send([*messages])

    def heard(self) -> Any:
        try:
            return self.pipe.recv()
        except EOFError:
            raise UserError("replica 0", "lost", "its engine has ended") from None

    def close(self) -> None:
        self.pipe.close()


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
    """A fleet of two engines, and a client of it."""

    def __init__(self, context: zmq.Context[Any], folder: Path) -> None:
        self.poller = zmq.Poller()
        self.started: list[tuple[int, bool]] = []
        self.engines: list[Said] = []
        self.exchange = Exchange(context, f"ipc://{folder / 'front'}")
        self.client = context.socket(zmq.DEALER)
        self.client.connect(f"ipc://{folder / 'front'}")
        self.fleet = RealFleet(self.start, 2, self.exchange, find_router("round-robin"), self.poller, 0, [])
        for engine in self.engines:
            engine.says(ABOUT)
        self.engine = self.engines[0]
        self.fleet.await_all()
        self.rows = Rows()
        self.metrics = LiveMetrics("m", 100)
        self.fleet.ledger = self.ledger = Ledger(self.fleet, self.metrics, self.rows)  # type: ignore[arg-type]

    def start(self, number: int, again: bool) -> Said:
        self.started.append((number, again))
        self.engines.append(Said())
        return self.engines[-1]

    def ask(self, their_id: int) -> int:
        """Ask, and return the id under which the engine got the request."""
        front = zmq.Poller()
        self.exchange.register(front)
        self.client.send(encode(Add(their_id, [1, 2, 3], 90, 0)))
        assert front.poll(5000)
        ((peer, asked),) = self.exchange.received()
        assert isinstance(asked, Add)
        id = self.exchange.open(peer, asked.id)
        self.ledger.expects(id, asked)
        self.fleet.add(id, asked)
        routed = self.engine.other.recv()
        assert (routed.asked.prompt, routed.arrived.id) == ([1, 2, 3], id)
        return id

    def listens(self) -> None:
        """Let the fleet listen until nothing is under way."""
        while self.ledger.under_way or self.fleet.engines[0].answers:
            assert self.poller.poll(5000), "the row or the refusal got lost"
            self.fleet.turn()

    def outputs(self) -> list[tuple[int, str, str]]:
        """Return what clients got: id, how the request ended, and why."""
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
    front.engine.says(
        Row("requests", {**row, "status": "rejected", "reason": "too many blocks"}),
        Outputs(0, [Output(id, [], finish="refused", reason="too many blocks")]),
    )
    front.listens()
    assert front.outputs() == [(7, "refused", "too many blocks")]


def test_what_is_under_way_when_the_server_ends_at_once_is_unfinished(front: Front) -> None:
    id = front.ask(7)
    front.engine.says(Outputs(0, [Output(id, [5, 6])]))
    for engine in front.engines:
        engine.other.close()
    front.fleet.close()
    assert front.outputs() == [(7, "", "")]
    assert front.outputs() == [(7, "abort", "the server ended")]
    (row,) = front.rows.requests
    assert (row["status"], row["output_tokens"]) == ("unfinished", 2)
    assert not front.ledger.under_way and front.engine.pipe.closed


def test_an_engine_that_ends_is_started_again_while_another_serves(front: Front) -> None:
    front.ask(7)
    steps = [Row("steps", {"step": number, "row_ids": [], "row_tokens": [], "preempted_ids": []}) for number in (0, 1)]
    front.engine.says(*steps)
    front.engine.other.close()
    front.listens()
    assert front.outputs() == [(7, "crashed", "engine 0 has ended")]
    assert [(row["status"], row["replica"]) for row in front.rows.requests] == [("aborted", 0)]
    assert front.started == [(0, False), (1, False), (0, True)]
    front.engines[2].says(ABOUT, *steps)
    assert front.poller.poll(5000)
    front.fleet.turn()
    assert front.rows.steps == [0, 1, 2, 3]
    front.engines[1].other.close()
    front.fleet.turn()
    front.engines[2].other.close()
    with pytest.raises(UserError, match="replica 0"):  # none serves: the server's supervisor starts all again
        front.fleet.turn()
    assert front.engines[2].pipe.closed and not front.metrics._lives


def hang(*pipe: Any) -> None:
    call_limit.CALL_LIMIT_S = call_limit.GRACE_S = 0.1
    call_limit.limited(sleep, 1e6)


def test_an_engine_whose_policy_hangs_says_so_and_ends() -> None:
    process = ReplicaProcess(0, hang)
    with pytest.raises(UserError, match="has not returned after"):
        process.heard()
    with pytest.raises(UserError, match="lost"):
        process.heard()
    process.close()
