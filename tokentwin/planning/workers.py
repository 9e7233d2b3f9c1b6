"""Trials on several processors: each worker is given the question once, and then one task after another.

Answers come in the order of the tasks, whatever the number of workers: a search does not depend on the machine.
Workers are deaf to Ctrl-C, which is for their parent to answer, and end with it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process, resource_tracker
from threading import Thread
from types import TracebackType
from typing import TypeVar

from tokentwin.planning.trial import Question

Answer = TypeVar("Answer")
Task = Callable[[Question], Answer]

_asked: list[Question] = []  # in a worker: the question


class Workers:
    """At most `jobs` processes, by default one for each CPU that this process may use; none for one job."""

    def __init__(self, question: Question, jobs: int | None = None) -> None:
        self.question = question
        jobs = jobs or len(os.sched_getaffinity(0))
        self._pool = (
            ProcessPoolExecutor(jobs, get_context("spawn"), initializer=_ask, initargs=(question,))
            if jobs > 1
            else None
        )
        self._others = set(active_children())

    def run(self, tasks: Sequence[Task[Answer]], done: Callable[[int], None] = lambda task: None) -> list[Answer]:
        """The answer of each task to the question; `done` is told the index of each. Raises what a task raises."""
        found = []
        try:
            for at, answer in enumerate(self._answers(tasks)):
                found.append(answer)
                done(at)
            return found
        except BrokenProcessPool:
            raise RuntimeError("a worker died, perhaps for want of memory; try --jobs 1") from None

    def _answers(self, tasks: Sequence[Task[Answer]]) -> Iterator[Answer]:
        if self._pool is None:
            return (task(self.question) for task in tasks)
        with _children_deaf_to_interrupts():
            return self._pool.map(_answer, tasks)

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            if kind is not None:  # nobody waits for what they are at
                for process in set(active_children()) - self._others:
                    process.terminate()
            self._pool.shutdown(cancel_futures=True)


@contextmanager
def _children_deaf_to_interrupts() -> Iterator[None]:
    resource_tracker.ensure_running()  # which starting a process would do, and thereby unblock the signal
    heard = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, heard)


def _ask(question: Question) -> None:
    _asked[:] = [question]
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Nobody waits for an answer any more when the parent was killed; a pool's worker would not notice."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _answer(task: Task[Answer]) -> Answer:
    return task(_asked[0])
