"""One of several engines, in its own process, which runs the requests that it is sent and reports on them.

Both ends of its pipe belong to one process, which has started it and without which it ends. A thread reads the pipe, so
that the engine's own thread is never kept from its steps and neither end waits for the other to read.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from realengine.devices.machine import describe
from realengine.engine import Engine
from realengine.loop import drive
from realengine.models.weights import ModelFiles
from realengine.parallel.replica_pipe import About, Arrival, End, HangUp, Inbox, Ran, Ready, Report
from realengine.replay import FLUSH_NS, RequestsAtEngine, canary
from realengine.run_recorder import RunRecorder
from realengine.step import Step
from realengine.undisturbed import no_cycle_search
from serving.deployments.config import Deployment
from serving.errors import UserError
from serving.python_process import without_main
from serving.user_code.call_limit import watching

_ENDING_S = 5.0  # time that a process may take to end by itself


class ReplicaProcess:
    """A process with the engine `number`, on the devices `gpus` of CUDA_VISIBLE_DEVICES if they are given.

    The first message from it is `About`. Calls raise UserError when the engine cannot do them, or has ended. Call
    `close` to end it.
    """

    def __init__(
        self,
        number: int,
        deployment: Deployment,
        files: ModelFiles,
        draft: ModelFiles | None = None,
        gpus: str | None = None,
    ) -> None:
        import torch.multiprocessing as mp

        spawn = mp.get_context("spawn")
        self.number = number
        self.pipe, theirs = spawn.Pipe()
        alone = deployment.tensor_parallel_size == 1  # an engine with ranks starts processes, which a daemon may not
        arguments = (deployment, files.to_send(), draft and draft.to_send(), gpus, theirs)
        self._process = spawn.Process(target=_serve, args=arguments, daemon=alone)
        with without_main():
            self._process.start()
        theirs.close()

    def begin(self, call: str, *arguments: object) -> None:
        """Begin a call of `_Served` or its engine; `heard` gives the answer."""
        self.send((call, arguments))

    def ask(self, call: str, *arguments: object) -> Any:
        """Return the answer to a call."""
        self.begin(call, *arguments)
        return self.heard()

    def send(self, message: object) -> None:
        """Send a message to the process."""
        with contextlib.suppress(OSError):  # it has ended: `heard` says why
            self.pipe.send(message)

    def heard(self) -> Any:
        """Return its next message."""
        try:
            said = self.pipe.recv()
        except (EOFError, OSError):
            self._process.join(_ENDING_S)
            code = self._process.exitcode
            how = f"was ended by signal {-code}" if code is not None and code < 0 else "ended; see its output"
            raise UserError(f"replica {self.number}", "lost", f"its engine {how}; start again") from None
        if isinstance(said, UserError):
            raise said
        if isinstance(said, Exception):
            raise RuntimeError(f"replica {self.number}: {said}")
        return said

    def close(self) -> None:
        """End the process. It may be called again, and after an error."""
        self.pipe.close()
        self._process.join(_ENDING_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(
    deployment: Deployment, files: ModelFiles, draft: ModelFiles | None, gpus: str | None, pipe: Connection
) -> None:
    """Run the process: answer calls until the other end hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C goes to all; the parent says when to end
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus  # read when CUDA is first used, which is later
    try:
        engine = Engine(deployment, files, draft)
        try:
            served = _Served(engine, pipe)
            pipe.send(served.about())
            while True:
                name, arguments = served.inbox.next()
                pipe.send(getattr(served if hasattr(served, name) else engine, name)(*arguments))
        finally:
            engine.close()
    except (EOFError, OSError):
        pass
    except UserError as error:
        _say(pipe, UserError(error.field, error.value, error.remedy))
    except Exception as error:
        _say(pipe, RuntimeError(f"{type(error).__name__}: {error}"))


def _say(pipe: Connection, error: Exception) -> None:
    with contextlib.suppress(OSError):
        pipe.send(error)


class _Served:
    """The calls that an engine process answers beside an engine's own."""

    def __init__(self, engine: Engine, pipe: Connection) -> None:
        self.inbox = Inbox(pipe)
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
        """Run the requests that come until `End`, and report on them.

        The process is first `Ready`, and gets the start of the run.
        """
        engine = self._engine
        with watching(), no_cycle_search():
            self._pipe.send(Ready())
            clients = _SentRequests(engine, self.inbox, self._pipe, self.inbox.next())
            drive(engine, clients, clients.recorder, lambda: clients.over)
        clients.close()
        return Ran(clients.recorder.launching_share)


class _SentRequests:
    """The requests from the other end, in the form of the engine's loop: see `realengine.loop.Clientele`."""

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
        """Report what is not yet reported."""
        self.take()  # requests sent before the end are unfinished, not unknown
        self.recorder.close()
        self._tell()

    def _tell(self, step: int | None = None, sampled: tuple[int, ...] = ()) -> None:
        requests, self._requests = self._requests, []
        steps, self._steps = self._steps, []
        ended = [row["request_id"] for row in requests]
        said = {id: output for id in ended if (output := self._at_engine.ended(id)) is not None}
        self._pipe.send(Report(requests, steps, said, step, sampled))
