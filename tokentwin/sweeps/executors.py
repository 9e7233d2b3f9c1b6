"""Where the runs of a sweep are made. Outcomes come as they are done, in any order."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Protocol

from serving.errors import UserError
from tokentwin.sweeps.one_run import Outcome
from tokentwin.sweeps.points import Point

EXECUTORS = ("process", "ray")
DIED = "the process that ran it died, perhaps for want of memory"


class Executor(Protocol):
    """Calls `measure` on each of `points`; a process that dies in it becomes a failed outcome."""

    def run(self, measure: Callable[[Point], Outcome], points: Sequence[Point]) -> Generator[Outcome, None, None]: ...


def find_executor(name: str, jobs: int | None) -> Executor:
    """The executor called `name`, making `jobs` runs at once (None: as many as there are CPUs for)."""
    if name == "process":
        from tokentwin.sweeps.processes import Processes

        return Processes(jobs)
    if name == "ray":
        from tokentwin.sweeps.ray_tasks import RayTasks

        return RayTasks(jobs)
    raise UserError("executor", name, f"is none of {', '.join(EXECUTORS)}")
