"""Several real engines, each in a process of its own, with one of the simulator's routers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from time import monotonic_ns
from types import MappingProxyType
from typing import Any, cast

import zmq

from tokentwin.apiserver.engine_messages import KvBatch, Routed, Row, StepEnd
from tokentwin.apiserver.exchange import Exchange
from tokentwin.apiserver.kv_cache_events.publisher import KvPublisher
from tokentwin.apiserver.ledger import Ledger
from tokentwin.apiserver.live_metrics import ReplicaNow
from tokentwin.apiserver.log import LOG
from tokentwin.apiserver.messages import Abort, About, Add, Outputs
from tokentwin.apiserver.prompt_segments import Answer, PromptSegments
from tokentwin.realengine.parallel.replica_pipe import End
from tokentwin.realengine.parallel.replica_process import ReplicaProcess
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.errors import UserError
from tokentwin.sim.routed_replica import RoutedReplica
from tokentwin.sim.router import ReplicaSet, Router


class RemoteEngine(RoutedReplica):
    """An engine process, as routers see it; its number of KV blocks is known when it serves."""

    def __init__(self, index: int, process: ReplicaProcess, publisher: KvPublisher | None) -> None:
        super().__init__(index, kv_tokens=1)
        self.process = process
        self.publisher = publisher
        self.about: About | None = None
        self.answers: dict[int, _Answer] = {}
        self._steps_before = self._steps = 0  # number of steps of earlier processes, and of all processes so far

    def answers_to(self, answer: _Answer) -> None:
        """Send a request to the engine."""
        asked, arrived = answer.asked, answer.arrived
        self.answers[arrived.id] = answer
        self.takes(arrived.id, len(asked.prompt), asked.max_tokens)
        self.process.send(Routed(asked, arrived))

    def serves(self, about: About) -> None:
        """Note that a process serves; a process that replaces another numbers its steps from 0 again."""
        self.about, self.kv_tokens = about, about.kv_tokens
        self._steps_before = self._steps

    def step(self, number: int) -> int:
        """Return the number of a step counted over all processes; `number` is its number in the current process."""
        self._steps = self._steps_before + number + 1
        return self._steps - 1

    def ends(self, id: int) -> _Answer:
        """Drop a request that has ended, and return its answer."""
        self.loses(id)
        return self.answers.pop(id)


class RealFleet:
    """The backend of real engines.

    `start(number, again)` starts the process of an engine; `again` is True if it replaces another process. If an
    engine's process ends, its open requests end with an error. If another engine serves, the process is started again;
    otherwise `turn` raises the error that states why it has ended. `publishers` publish KV events, one for each engine.
    """

    about: About

    def __init__(
        self,
        start: Callable[[int, bool], ReplicaProcess],
        replicas: int,
        exchange: Exchange,
        router: Router,
        poller: zmq.Poller,
        origin_ns: int,
        publishers: list[KvPublisher],
    ) -> None:
        self.ledger: Ledger
        self._start = start
        self._exchange = exchange
        self._router = router
        self._poller = poller
        self._origin_ns = origin_ns
        self._ready = ReplicaSet()
        self._engine_of: dict[int, RemoteEngine] = {}
        self._segments: PromptSegments
        self.engines: list[RemoteEngine] = []
        for number in range(replicas):
            publisher = publishers[number] if publishers else None
            self.engines.append(RemoteEngine(number, start(number, False), publisher))
            poller.register(self.engines[number].process.pipe, zmq.POLLIN)

    def await_all(self) -> None:
        """Wait until every engine serves. Raises UserError if one cannot serve."""
        while len(self._ready) < len(self.engines):
            self._poller.poll()
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
        engine.answers_to(_Answer(asked, request))

    def refusal(self, id: int, asked: Add) -> tuple[int, str] | None:
        return None

    def plant(self, failures: str) -> str:
        """Return empty text: only a twin's requests fail at will."""
        return ""

    def abort(self, id: int, why: str) -> None:
        if (engine := self._engine_of.get(id)) is not None:
            engine.process.send(Abort(id, why))

    def rest(self, level: int) -> float:
        """Return 0: the engines keep their memory, because clients get level 0 only."""
        return 0.0

    moves_s = rest

    def turn(self) -> float | None:
        for engine in self.engines:
            if engine.publisher is not None:
                engine.publisher.replay()
            self._listen(engine)
        return None

    def replicas(self) -> list[ReplicaNow]:
        blocks = int(self.about.run["num_blocks"])
        return [
            ReplicaNow(engine.index, bool(engine.answers), blocks, self._deployment)
            for engine in self.engines
            if engine.about is not None
        ]

    def well(self) -> bool:
        return not any(engine.process.stopped for engine in self.engines)

    def close(self) -> None:
        for engine in self.engines:
            engine.process.send(End())
        for engine in self.engines:
            with suppress(UserError, RuntimeError):  # an error is raised when its process has ended
                while True:
                    self._hear_all(engine)
            self._give_up(engine, "abort", "the server ended", "unfinished")
        self._end_all()

    def _end_all(self) -> None:
        for engine in self.engines:
            engine.process.close()
            if engine.publisher is not None:
                engine.publisher.close()

    def _listen(self, engine: RemoteEngine) -> None:
        try:
            while engine.process.pipe.poll():
                self._hear_all(engine)
        except (UserError, RuntimeError) as error:
            self._lost(engine, error)

    def _hear_all(self, engine: RemoteEngine) -> None:
        for message in engine.process.heard():
            self._hear(engine, message)

    def _hear(self, engine: RemoteEngine, message: Any) -> None:
        match message:
            case About():
                engine.serves(message)
                self._ready.join(engine.as_replica)
            case Outputs():
                self._pass_on(engine, message)
            case Row():
                self._row(engine, message)
            case StepEnd():
                self.ledger.step_ended(message._replace(replica=engine.index))
            case KvBatch() if engine.publisher is not None:
                engine.publisher.publish(message.batch)

    def _pass_on(self, engine: RemoteEngine, message: Outputs) -> None:
        for output in message.outputs:
            answer = engine.answers[output.id]
            answer.tokens += output.tokens
            engine.got(output.id, len(output.tokens))
            self._exchange.give(output.id, output.tokens, output.logprobs)
            self._exchange.give_prompt(output.id, output.cached, output.prompt_logprobs)
            if output.pooled is not None:
                self._exchange.give_pooled(output.id, output.pooled)
            if output.finish:
                self._exchange.end(output.id, output.finish, output.reason, output.status)
                self._ended(engine, answer)
        self._exchange.flush(message.due_ns)

    def _row(self, engine: RemoteEngine, message: Row) -> None:
        row = {**message.columns, "replica": engine.index}
        if message.dataset == "steps":
            self.ledger.add_step(**{**row, "step": engine.step(row["step"])})
        else:
            engine.answers[row["request_id"]].row = row  # the last output of the request follows

    def _ended(self, engine: RemoteEngine, answer: _Answer) -> None:
        id = answer.arrived.id
        engine.ends(id)
        del self._engine_of[id]
        self._segments.answered(answer)
        self.ledger.add_request(**answer.row)

    def _lost(self, engine: RemoteEngine, error: UserError | RuntimeError) -> None:
        served, engine.about = engine.about is not None, None
        self._poller.unregister(engine.process.pipe)
        if served:
            self._ready.leave(engine.as_replica)
        if not (served and self._ready):
            self._end_all()
            raise error
        LOG.error("engine %d is started again, and its %d requests end: %s", engine.index, len(engine.answers), error)
        self._give_up(engine, "crashed", f"engine {engine.index} has ended", "aborted")
        engine.process.close()
        engine.process = self._start(engine.index, True)
        self._poller.register(engine.process.pipe, zmq.POLLIN)
        if engine.publisher is not None:
            engine.publisher.restart()

    def _give_up(self, engine: RemoteEngine, finish: str, reason: str, status: str) -> None:
        """End the open requests of an engine that has ended."""
        for id, answer in list(engine.answers.items()):
            arrived, now_ns = answer.arrived, self.run_ns(monotonic_ns())
            self._exchange.end(id, finish, reason)
            answer.row = answer.row or {
                **arrived.labels,
                "replica": engine.index,
                "status": status,
                "reason": reason,
                "prompt_tokens": arrived.prompt_len,
                "output_tokens": len(answer.tokens),
                "arrival_ns": arrived.arrival_ns,
                "send_ns": arrived.arrival_ns,
                "end_ns": now_ns,
            }
            self._ended(engine, answer)
        self._exchange.flush(monotonic_ns())


class _Answer(Answer):
    row: Mapping[str, Any] = MappingProxyType({})  # empty until the engine has sent the row
