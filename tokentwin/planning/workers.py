"""Trials on several processors: each worker is given the question once, and then one task after another.

Answers come in the order of the tasks, whatever the number of workers: a search does not depend on the machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
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

    def run(self, tasks: Sequence[Task[Answer]]) -> list[Answer]:
        """The answer of each task to the question. Raises what a task raises."""
        if self._pool is None:
            return [task(self.question) for task in tasks]
        try:
            return list(self._pool.map(_answer, tasks))
        except BrokenProcessPool:
            raise RuntimeError("a worker died, perhaps for want of memory; try --jobs 1") from None

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _ask(question: Question) -> None:
    _asked[:] = [question]


def _answer(task: Task[Answer]) -> Answer:
    return task(_asked[0])
