"""The code in a process with one of several engines: it replays the requests that it is sent, and reports on them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from tokentwin.realengine.devices.machine import describe
from tokentwin.realengine.engine import Engine
from tokentwin.realengine.loop import drive
from tokentwin.realengine.models.weights import ModelFiles
from tokentwin.realengine.parallel.replica_pipe import About, Arrival, End, HangUp, Inbox, Ran, Ready, Report
from tokentwin.realengine.parallel.replica_process import ReplicaProcess
from tokentwin.realengine.replay import FLUSH_NS, RequestsAtEngine, canary
from tokentwin.realengine.run_recorder import RunRecorder
from tokentwin.realengine.step import Step
from tokentwin.realengine.undisturbed import no_cycle_search
from tokentwin.serving.deployments.config import Deployment


def start_replica(
    number: int, deployment: Deployment, files: ModelFiles, draft: ModelFiles | None = None, gpus: str | None = None
) -> ReplicaProcess:
    """Start the process of engine number `number`; its first message is `About`."""
    serve = partial(_serve, deployment, files.to_send(), draft and draft.to_send())
    return ReplicaProcess(number, serve, gpus, deployment.tensor_parallel_size > 1)


def _serve(deployment: Deployment, files: ModelFiles, draft: ModelFiles | None, inbox: Inbox, pipe: Connection) -> None:
    """Answer calls until the parent closes the pipe."""
    engine = Engine(deployment, files, draft)
    try:
        served = _Served(engine, inbox, pipe)
        pipe.send(served.about())
        while True:
            name, arguments = inbox.next()
            pipe.send(getattr(served if hasattr(served, name) else engine, name)(*arguments))
    finally:
        engine.close()


class _Served:
    """The calls that an engine process answers in addition to the methods of `Engine`."""

    def __init__(self, engine: Engine, inbox: Inbox, pipe: Connection) -> None:
        self._inbox = inbox
        self._engine = engine
        self._pipe = pipe

    def about(self) -> About:
        engine = self._engine
        return About(
            deployment=engine.deployment.model_dump_json(exclude_unset=True),
            hardware=describe(engine.deployment.device),
            vocab_size=engine.spec.vocab_size,
            num_blocks=engine.scheduler.pool.total,
            notes=engine.notes,
            forces=engine.deployment.scheduler.speculative is None,
            memory_report=engine.memory_report,
        )

    def reset(self) -> None:
        self._engine.reset()
        self._engine.watch_speed()

    def canary(self) -> int:
        return canary(self._engine)

    def replay(self) -> Ran:
        """Run the requests that arrive until `End`, and report on them.

        The process first sends `Ready` and receives the start of the run.
        """
        engine = self._engine
        with no_cycle_search():
            self._pipe.send(Ready())
            clients = _SentRequests(engine, self._inbox, self._pipe, self._inbox.next())
            drive(engine, clients, clients.recorder, lambda: clients.over)
        clients.close()
        return Ran(clients.recorder.launching_share)


class _SentRequests:
    """The requests that the parent sends, as the `tokentwin.realengine.loop.Clientele` of the engine's loop."""

    busy = True

    def __init__(self, engine: Engine, inbox: Inbox, pipe: Connection, started_ns: int) -> None:
        self.over = False
        self.recorder = RunRecorder(self, started_ns, tier=engine.tier_name)
        self._at_engine = RequestsAtEngine(engine, self.recorder)
        self._inbox = inbox
        self._pipe = pipe
        self._requests: list[dict[str, Any]] = []
        self._steps: list[dict[str, Any]] = []

    def add_request(self, **row: Any) -> None:
        self._requests.append(row)

    def add_step(self, **row: Any) -> None:
        self._steps.append(row)

    def take(self) -> None:
        for message in self._inbox.take():
            self._hear(message)

    def _hear(self, message: Any) -> None:
        match message:
            case Arrival(arrived, prompt, output, send_ns):
                if not self._at_engine.add(arrived, prompt, output, send_ns):
                    self._tell()
            case HangUp(id):
                if self._at_engine.hang_up(id) is not None:
                    self._tell()
            case End():
                self.over = True

    def ran(self, step: Step) -> None:
        self._tell(step.plan.seq, tuple(request.id for request in step.sampled))

    def await_(self, stopped: Callable[[], bool]) -> None:
        if not stopped() and not self._inbox.wait(FLUSH_NS / 1e9):
            self.recorder.flush_steps()
            if self._steps:
                self._tell()
            self._inbox.wait()

    def close(self) -> None:
        """Report everything that was not reported yet."""
        self.take()  # requests sent before the end are unfinished, not unknown
        self.recorder.close()
        self._tell()

    def _tell(self, step: int | None = None, sampled: tuple[int, ...] = ()) -> None:
        requests, self._requests = self._requests, []
        steps, self._steps = self._steps, []
        ended = [row["request_id"] for row in requests]
        said = {id: output for id in ended if (output := self._at_engine.ended(id)) is not None}
        self._pipe.send(Report(requests, steps, said, step, sampled))
