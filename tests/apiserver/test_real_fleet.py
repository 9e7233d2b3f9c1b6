"""Several engines behind one router, held against an engine process that says what a test has it say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import zmq

from apiserver.exchange import Exchange
from apiserver.ledger import Ledger
from apiserver.live_metrics import LiveMetrics
from apiserver.messages import (
    About,
    Add,
    From,
    Hello,
    Output,
    Outputs,
    Row,
    encode,
    read_answer,
    read_request,
)
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


def test_a_client_hears_that_its_engine_rejected_its_request(tmp_path: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    poller = zmq.Poller()
    engine = Said(context, f"ipc://{tmp_path / 'engine'}")
    exchange = Exchange(context, f"ipc://{tmp_path / 'front'}")
    client = context.socket(zmq.DEALER)
    client.connect(f"ipc://{tmp_path / 'front'}")
    fleet = RealFleet(context, [f"ipc://{tmp_path / 'engine'}"], exchange, find_router("round-robin"), 0)
    fleet.register(poller)
    try:
        poller.poll()
        fleet.turn()
        assert isinstance(engine.hears(), Hello)
        engine.says(ABOUT)
        fleet.await_all(poller)
        fleet.ledger = ledger = Ledger(fleet, LiveMetrics("m", 100), None)

        front = zmq.Poller()
        exchange.register(front)
        client.send(encode(Add(7, [1, 2, 3], 90, 0)))
        assert front.poll(5000)
        ((peer, asked),) = exchange.received()
        id = exchange.open(peer, asked.id)
        ledger.expects(id, asked)
        fleet.add(id, asked)
        assert engine.hears().id == id
        times = {"arrival_ns": 1, "send_ns": 2, "end_ns": 3}
        row = {**REJECTED, **times, "request_id": id, "replica": 0, "output_tokens": 0}
        engine.says(Row("requests", {**row, "status": "rejected", "reason": "too many blocks"}))
        engine.says(Outputs(0, [Output(id, [], finish="refused", reason="too many blocks")]))
        while ledger.under_way or fleet.engines[0].answers:
            assert poller.poll(5000), "the row or the refusal got lost"
            fleet.turn()
        assert client.poll(5000), "the client waits in vain"
        told = read_answer(client.recv())
        assert [(output.id, output.finish, output.reason) for output in told.outputs] == [
            (7, "refused", "too many blocks")
        ]
        assert not fleet.engines[0].answers and exchange.known(peer, 7) is None
    finally:
        context.destroy(linger=0)
