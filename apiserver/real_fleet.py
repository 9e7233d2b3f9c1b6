"""Several real engines, each in a process of its own, behind one of the simulator's routers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import monotonic_ns
from typing import Any, cast

import zmq
from zmq.utils.monitor import recv_monitor_message

from apiserver.exchange import Exchange
from apiserver.ledger import Ledger
from apiserver.live_metrics import ReplicaNow
from apiserver.messages import (
    Abort,
    About,
    Add,
    Delivered,
    Drain,
    Hello,
    Message,
    Outputs,
    Row,
    StepEnd,
    encode,
    read_answer,
)
from apiserver.prompt_segments import Answer, PromptSegments
from serving.deployments.config import Deployment
from serving.request import Status
from sim.replica_set import ReplicaSet
from sim.routed_replica import RoutedReplica
from sim.router import Router

_LOG = logging.getLogger("tokentwin")


class RemoteEngine(RoutedReplica):
    """An engine process as routers see it: the number of its KV blocks is known once it serves."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], index: int, address: str) -> None:
        super().__init__(index, kv_tokens=1)
        self.about: About | None = None
        self.answers: dict[int, _Answer] = {}
        self._steps_before = self._steps = 0  # steps of earlier processes, and of all processes by now
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, b"fleet")
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.events = self.socket.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        self.socket.connect(address)

    def send(self, message: Message) -> None:
        self.socket.send(encode(message))

    def answers_to(self, id: int, answer: _Answer) -> None:
        """Note a request that was sent to the engine."""
        self.answers[id] = answer
        self.takes(id, len(answer.asked.prompt), answer.asked.max_tokens)

    def serves(self, about: About) -> None:
        """Note that a process serves; a process that replaces another counts its steps from 0."""
        self.about, self.kv_tokens = about, about.kv_tokens
        self._steps_before = self._steps

    def step(self, number: int) -> int:
        """Return the number of a step among the steps of all its processes; `number` counts in the present process."""
        self._steps = self._steps_before + number + 1
        return self._steps - 1

    def ends(self, id: int) -> _Answer:
        """Drop a request that has ended, and return its answer."""
        self.loses(id)
        return self.answers.pop(id)


class RealFleet:
    """The backend of the engines at `addresses`. If an engine ends, its open requests end with an error."""

    about: About

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        addresses: Sequence[str],
        exchange: Exchange,
        router: Router,
        origin_ns: int,
    ) -> None:
        self.ledger: Ledger
        self.engines = [RemoteEngine(context, index, address) for index, address in enumerate(addresses)]
        self._exchange = exchange
        self._router = router
        self._ready = ReplicaSet()
        self._origin_ns = origin_ns
        self._engine_of: dict[int, RemoteEngine] = {}
        self._segments: PromptSegments

    def register(self, poller: zmq.Poller) -> None:
        """Let `poller` wake when an engine sends a message, comes or goes."""
        for engine in self.engines:
            poller.register(engine.socket, zmq.POLLIN)
            poller.register(engine.events, zmq.POLLIN)

    def await_all(self, poller: zmq.Poller) -> None:
        """Return when every engine serves."""
        while len(self._ready) < len(self.engines):
            poller.poll()
            self.turn()
        self.about = cast(About, self.engines[0].about)
        self._segments = PromptSegments(self.about.block_size)
        self._deployment = Deployment.model_validate_json(self.about.run["deployment"])

    def run_ns(self, monotonic_ns: int) -> int:
        return monotonic_ns - self._origin_ns

    def monotonic_ns(self, run_ns: int) -> int:
        return run_ns + self._origin_ns

    def add(self, id: int, asked: Add) -> None:
        request = self._segments.request(id, self.run_ns(monotonic_ns()), asked)
        self.ledger.arrived(request)
        engine = cast(RemoteEngine, self._router.choose(request, self._ready))
        self._engine_of[id] = engine
        engine.answers_to(id, _Answer(asked, request))
        asked.id = id
        engine.send(asked)

    def refusal(self, id: int, asked: Add) -> tuple[int, str] | None:
        return None if self._ready else (503, "no engine is ready")

    def abort(self, id: int, why: str) -> None:
        if (engine := self._engine_of.get(id)) is not None:
            engine.send(Abort(id, why))

    def turn(self) -> float | None:
        for engine in self.engines:
            self._listen(engine)
        return None

    def replicas(self) -> list[ReplicaNow]:
        blocks = int(self.about.run["num_blocks"])
        return [
            ReplicaNow(engine.index, bool(engine.answers), blocks, self._deployment)
            for engine in self.engines
            if engine.about is not None
        ]

    def close(self) -> None:
        self.turn()
        for engine in self.engines:
            for id in list(engine.answers):
                self._exchange.end(id, "abort", "the server ended")
                self._left(engine, id, "unfinished", "the server ended")
            engine.socket.disable_monitor()
            engine.events.close()
            engine.socket.close()
        self._exchange.flush(monotonic_ns())

    def _listen(self, engine: RemoteEngine) -> None:
        while engine.events.poll(0):
            if recv_monitor_message(engine.events)["event"] == zmq.EVENT_CONNECTED:
                engine.send(Hello())
            elif engine.about is not None:
                self._lost(engine)
        while True:
            try:
                message = read_answer(engine.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            match message:
                case About():
                    engine.serves(message)
                    self._ready.join(engine.as_replica)
                case Outputs():
                    self._pass_on(engine, message)
                case Row():
                    self._row(engine, message)
                case StepEnd():
                    message.replica = engine.index
                    self.ledger.step_ended(message)
                case Drain() if engine in self._ready:
                    self._ready.leave(engine.as_replica)

    def _pass_on(self, engine: RemoteEngine, message: Outputs) -> None:
        for output in message.outputs:
            if (answer := engine.answers.get(output.id)) is None:
                continue
            answer.tokens += output.tokens
            engine.got(output.id, len(output.tokens))
            self._exchange.give(output.id, output.tokens, output.logprobs)
            if output.finish:
                self._exchange.end(output.id, output.finish, output.reason)
                engine.send(Delivered(output.id, 0, 0, 0, 0))
                if answer.row is not None:
                    self._ended(engine, answer.row)
                elif output.finish == "refused":  # the engine was about to end, or was full, so it writes no row
                    self._left(engine, output.id, Status.REJECTED.value, output.reason)
        self._exchange.flush(message.due_ns)

    def _row(self, engine: RemoteEngine, message: Row) -> None:
        row = {**message.columns, "replica": engine.index}
        if message.dataset == "steps":
            self.ledger.add_step(**{**row, "step": engine.step(row["step"])})
        elif row["request_id"] not in engine.answers:
            return  # row of an earlier process
        elif row["status"] in ("finished", "rejected"):
            engine.answers[row["request_id"]].row = row  # the last tokens, or the refusal, are on their way
        else:
            self._ended(engine, row)

    def _ended(self, engine: RemoteEngine, row: dict[str, Any]) -> None:
        id = row["request_id"]
        answer = engine.ends(id)
        del self._engine_of[id]
        self._segments.answered(answer)
        self.ledger.add_request(**{**row, "arrival_ns": answer.arrived.arrival_ns})

    def _lost(self, engine: RemoteEngine) -> None:
        engine.about = None
        if engine in self._ready:
            self._ready.leave(engine.as_replica)
        _LOG.error("engine %d is gone; its %d requests end", engine.index, len(engine.answers))
        for id in list(engine.answers):
            self._exchange.end(id, "crashed", f"engine {engine.index} has ended")
            self._left(engine, id, Status.ABORTED.value, "its engine has ended")
        self._exchange.flush(monotonic_ns())

    def _left(self, engine: RemoteEngine, id: int, status: str, reason: str) -> None:
        """Write the row of a request that its engine has left without one."""
        answer = engine.ends(id)
        del self._engine_of[id]
        self.ledger.add_request(
            **answer.arrived.labels,
            replica=engine.index,
            status=status,
            reason=reason,
            prompt_tokens=answer.arrived.prompt_len,
            output_tokens=len(answer.tokens),
            arrival_ns=answer.arrived.arrival_ns,
            send_ns=answer.arrived.arrival_ns,
            end_ns=self.run_ns(monotonic_ns()),
        )


class _Answer(Answer):
    row: dict[str, Any] | None = None
