"""Runs as Ray tasks: on the cluster that is there (`RAY_ADDRESS`, or one started on this machine), or a local one.

Other nodes need the same tokentwin, and the files that a sweep names at the same paths.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import chdir, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from planning.sweep.one_run import DIED, RunResult, failed
from planning.sweep.points import Point
from serving.errors import UserError
from serving.python_process import module_environment


class RayTasks:
    """At most `jobs` tasks at once, by default one for each CPU of the cluster. Raises UserError without Ray."""

    def __init__(self, jobs: int | None = None) -> None:
        try:
            import ray
        except ModuleNotFoundError:
            raise UserError("executor", "ray", "is not installed; pip install 'tokentwin[ray]'") from None
        self._ray = ray
        self._jobs = jobs

    def run(self, measure: Callable[[Point], RunResult], points: Sequence[Point]) -> Generator[RunResult, None, None]:
        """See `Executor`."""
        ray = self._ray
        joined = ray.is_initialized()
        if not joined:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a local cluster tells nobody
            os.environ.update(module_environment())  # where its workers find this package
            # They look for modules where Ray was begun, before anywhere else: not among a user's own files.
            with TemporaryDirectory() as nothing, chdir(nothing):
                ray.init(num_cpus=None, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        try:
            task = ray.remote(num_cpus=1, max_retries=0)(_measured)
            jobs = self._jobs or max(int(ray.cluster_resources().get("CPU", 1)), 1)
            left, where = iter(points), str(Path.cwd())
            under_way = {task.remote(where, measure, point): point for _, point in zip(range(jobs), left, strict=False)}
            while under_way:
                (done, *_), _ = ray.wait(list(under_way))
                point = under_way.pop(done)
                try:
                    yield ray.get(done)
                except ray.exceptions.RayError:
                    yield failed(point, DIED)
                following = next(left, None)
                if following is not None:
                    under_way[task.remote(where, measure, following)] = following
        finally:
            if not joined:
                ray.shutdown()


def _measured(where: str, measure: Callable[[Point], RunResult], point: Point) -> RunResult:
    with suppress(OSError):  # a node may lack it: then names of files that are not absolute are found nowhere
        os.chdir(where)
    return measure(point)
