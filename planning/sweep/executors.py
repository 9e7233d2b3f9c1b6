"""Executors of the runs of a sweep. They yield results as the runs end, in any order."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from importlib.util import find_spec

from tokentwin.planning.sweep.one_run import DIED, OVERDUE, RunResult, failed
from tokentwin.planning.sweep.points import Point
from tokentwin.planning.sweep.ray_tasks import as_ray_tasks
from tokentwin.planning.workers import Overdue, WorkerDied, Workers
from tokentwin.serving.errors import UserError

Results = Generator[RunResult, None, None]
Measure = Callable[[Point], RunResult]
Executor = Callable[[Measure, Sequence[Point]], Results]  # a process that dies in a run becomes a failed result


def in_processes(
    measure: Measure, points: Sequence[Point], jobs: int | None = None, limit_s: float | None = None
) -> Results:
    """Yield the results of runs in at most `jobs` processes of this machine, by default one for each usable CPU.

    `limit_s` is the maximum time of a run in seconds. One job without a limit runs in this process.
    """
    if jobs == 1 and limit_s is None:
        yield from map(measure, points)
        return
    tasks = [partial(_measured, point=point) for point in points]
    with Workers(measure, jobs) as workers, closing(workers.as_completed(tasks, limit_s)) as outcomes:
        for at, outcome in outcomes:
            if isinstance(outcome, WorkerDied):
                yield failed(points[at], DIED)
            elif isinstance(outcome, Overdue):
                yield failed(points[at], OVERDUE)
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                yield outcome


_EXECUTORS = {"process": in_processes, "ray": as_ray_tasks}


def find_executor(name: str, jobs: int | None, limit_s: float | None = None) -> Executor:
    """Return the executor named `name`, which makes `jobs` runs at a time (None: one for each CPU).

    A run that takes longer than `limit_s` seconds fails. Raises UserError for an unknown name, and for Ray if it is not
    installed.
    """
    if not isinstance(name, str) or name not in _EXECUTORS:
        raise UserError("executor", name, f"must be one of {', '.join(_EXECUTORS)}")
    if name == "ray" and find_spec("ray") is None:
        raise UserError("executor", "ray", "is not installed; pip install 'tokentwin[ray]'")
    return partial(_EXECUTORS[name], jobs=jobs, limit_s=limit_s)


def _measured(measure: Measure, point: Point) -> RunResult:
    return measure(point)
