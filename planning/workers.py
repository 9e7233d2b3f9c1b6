"""Tasks in several processes: a worker receives the data that all tasks share once, and then one task at a time.

Process pools of the standard library and of loky cannot be used any more when one of their processes dies. Here only
the task in that process is lost. A task can also have a time limit and report progress. Workers ignore Ctrl-C, which
their parent handles, and end with their parent.
"""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from contextvars import ContextVar
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from threading import Thread
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

from tokentwin.serving.errors import UserError
from tokentwin.serving.python_process import without_main
from tokentwin.serving.user_code.call_limit import watch

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

Common = TypeVar("Common")
Answer = TypeVar("Answer")
Task = Callable[[Common], Answer]

_SPAWN = get_context("spawn")
_LOST = (EOFError, OSError)
_MARKED: ContextVar[Callable[[float], None] | None] = ContextVar("marked", default=None)


class _Mark(NamedTuple):
    """A report that `amount` of the work in a task is done."""

    amount: float


def mark(amount: float) -> None:
    """Report from within a task that `amount` more of the work is done, in units of the task; elsewhere do nothing."""
    marked = _MARKED.get()
    if marked is not None:
        marked(amount)


class WorkerDied(Exception):
    """The process of a task ended before the task did, perhaps because memory ran out."""


class Overdue(Exception):
    """A task took longer than its limit, and its process was ended."""


class _Worker(NamedTuple):
    connection: Connection
    process: SpawnProcess


class Workers(Generic[Common]):
    """A pool of at most `jobs` processes, which live until the context is left; by default one for each CPU.

    Attributes:
        common: the argument of every task
        marked: a function that receives the amounts that tasks `mark`
    """

    def __init__(
        self, common: Common, jobs: int | None = None, marked: Callable[[float], None] = lambda amount: None
    ) -> None:
        self.common, self.marked = common, marked
        self.jobs = jobs or len(os.sched_getaffinity(0))
        self._idle: list[_Worker] = []

    def run(self, tasks: Sequence[Task[Common, Answer]]) -> list[Answer]:
        """Return the answers of the tasks in the order of the tasks. If `jobs` is 1, tasks run in this process.

        Raises the exception of a task, and UserError if a worker dies.
        """
        answers_by_task: dict[int, Answer] = {}
        alone = ((at, task(self.common)) for at, task in enumerate(tasks))
        before = _MARKED.set(self.marked)
        try:
            with closing(alone if self.jobs == 1 else self.as_completed(tasks)) as answers:
                for at, answer in answers:
                    if isinstance(answer, WorkerDied):
                        remedy = "a worker process died, perhaps because memory ran out; try --jobs 1"
                        raise UserError("jobs", self.jobs, remedy)
                    if isinstance(answer, BaseException):
                        raise answer
                    answers_by_task[at] = answer
        finally:
            _MARKED.reset(before)
        return [answers_by_task[at] for at in range(len(tasks))]

    def as_completed(
        self, tasks: Sequence[Task[Common, Answer]], limit_s: float | None = None
    ) -> Generator[tuple[int, Answer | BaseException], None, None]:
        """Yield the number of each task and its answer or exception as tasks end; tasks always run in other processes.

        The answer is `WorkerDied` if the process died, and `Overdue` after `limit_s` seconds, which include the start
        of the process.
        """
        left = iter(enumerate(tasks))
        busy: dict[Connection, tuple[_Worker, int, float]] = {}  # with its start time, in the order of start times

        def give(worker: _Worker | None = None) -> None:
            following = next(left, None)
            if following is None:
                if worker is not None:
                    self._idle.append(worker)
                return
            worker = worker or (self._idle.pop() if self._idle else _started(self.common))
            busy[worker.connection] = worker, following[0], monotonic()
            with suppress(*_LOST):  # if the process is gone, this is noticed when it is waited for
                worker.connection.send(following[1])

        try:
            for _ in range(min(self.jobs, len(tasks))):
                give()
            while busy:
                longest, (_, _, began) = next(iter(busy.items()))
                ready = wait(list(busy), None if limit_s is None else max(began + limit_s - monotonic(), 0))
                if not ready:
                    worker, at, _ = busy.pop(longest)
                    _end(worker)
                    yield at, Overdue()
                    give()
                for connection in ready:
                    worker, at, _ = busy[cast(Connection, connection)]
                    try:
                        answer = worker.connection.recv()
                    except _LOST:
                        del busy[worker.connection]
                        _end(worker)
                        yield at, WorkerDied()
                        give()
                    else:
                        if isinstance(answer, _Mark):
                            self.marked(answer.amount)
                            continue
                        del busy[worker.connection]
                        give(worker)
                        yield at, answer
        finally:
            for worker, _, _ in busy.values():  # the answers of these workers are not needed any more
                _end(worker)

    def __enter__(self) -> Workers[Common]:
        return self

    def __exit__(self, *_: object) -> None:
        while self._idle:
            _end(self._idle.pop())


def _started(common: Any) -> _Worker:
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_serve, args=(theirs,), daemon=True)
    resource_tracker.ensure_running()  # start() would do this, and thereby unblock the signal
    heard = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the child inherits this and keeps it
    try:
        with without_main():
            process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, heard)
    theirs.close()
    with suppress(*_LOST):
        ours.send(common)  # not as an argument, because Python would print an error if this process dies meanwhile
    return _Worker(ours, process)


def _end(worker: _Worker) -> None:
    worker.connection.close()
    worker.process.kill()
    worker.process.join()


def _serve(connection: Connection) -> None:
    from tokentwin.traces.without_pandas import spare_pandas  # loads pyarrow

    spare_pandas()
    Thread(target=_end_with_parent, daemon=True).start()
    watch(connection.send)
    _MARKED.set(lambda amount: connection.send(_Mark(amount)))
    with suppress(*_LOST):
        common = connection.recv()
        while True:
            task = connection.recv()
            try:
                answer = task(common)
            except Exception as error:
                answer = _portable(error)
            connection.send(answer)


def _portable(error: Exception) -> Exception:
    """Return the error, or a RuntimeError with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _end_with_parent() -> None:
    """Exit when the parent has ended, because the answer is not needed any more."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
