"""Where the runs of a sweep are made. Outcomes come as they are done, in any order."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from typing import Protocol

from planning.sweep.one_run import DIED, OVERDUE, RunResult, failed
from planning.sweep.points import Point
from planning.workers import Overdue, WorkerDied, Workers
from serving.errors import UserError

EXECUTORS = ("process", "ray")


class Executor(Protocol):
    """Calls `measure` on each of `points`; a process that dies in it becomes a failed outcome."""

    def run(
        self, measure: Callable[[Point], RunResult], points: Sequence[Point]
    ) -> Generator[RunResult, None, None]: ...


class Processes:
    """At most `jobs` processes of this machine, by default one for each CPU that this process may use.

    `limit_s` is the longest that a run may take, in seconds.
    """

    def __init__(self, jobs: int | None = None, limit_s: float | None = None) -> None:
        self._jobs = jobs
        self._limit_s = limit_s

    def run(self, measure: Callable[[Point], RunResult], points: Sequence[Point]) -> Generator[RunResult, None, None]:
        """See `Executor`."""
        tasks = [partial(_measured, point=point) for point in points]
        with Workers(measure, self._jobs) as workers, closing(workers.each(tasks, self._limit_s)) as outcomes:
            for at, outcome in outcomes:
                if isinstance(outcome, WorkerDied):
                    yield failed(points[at], DIED)
                elif isinstance(outcome, Overdue):
                    yield failed(points[at], OVERDUE)
                elif isinstance(outcome, BaseException):
                    raise outcome
                else:
                    yield outcome


def find_executor(name: str, jobs: int | None, limit_s: float | None = None) -> Executor:
    """The executor called `name`, making `jobs` runs at once (None: as many as there are CPUs for), each in `limit_s`
    seconds or not at all.
    """
    if name == "process":
        return Processes(jobs, limit_s)
    if name == "ray":
        from planning.sweep.ray_tasks import RayTasks

        return RayTasks(jobs, limit_s)
    raise UserError("executor", name, f"must be one of {', '.join(EXECUTORS)}")


def _measured(measure: Callable[[Point], RunResult], point: Point) -> RunResult:
    return measure(point)
