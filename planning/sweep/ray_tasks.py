"""Runs as Ray tasks, on an existing cluster (`RAY_ADDRESS`, or one started on this machine) or a local one.

Other nodes need the same version of tokentwin, and the files that the sweep names, at the same paths.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import chdir, suppress
from itertools import islice
from logging import ERROR
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from tokentwin.planning.sweep.one_run import DIED, OVERDUE, RunResult, failed
from tokentwin.planning.sweep.points import Point
from tokentwin.serving.python_process import module_environment


def as_ray_tasks(
    measure: Callable[[Point], RunResult],
    points: Sequence[Point],
    jobs: int | None = None,
    limit_s: float | None = None,
) -> Generator[RunResult, None, None]:
    """Yield the results of runs as they end, from at most `jobs` tasks at a time, by default one for each CPU.

    `limit_s` is the maximum time of a run in seconds, counted from the time when Ray receives it.
    """
    import ray

    joined = ray.is_initialized()
    if not joined:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a local cluster sends no usage statistics
        os.environ.update(module_environment())  # the path on which its workers find this package
        # Workers look for modules first in the directory where Ray was started. An empty directory prevents that they
        # import the user's own files.
        with TemporaryDirectory() as nothing, chdir(nothing):
            ray.init(num_cpus=None, include_dashboard=False, log_to_driver=False, logging_level=ERROR)
    try:
        task = ray.remote(num_cpus=1, max_retries=0)(_measured)
        jobs = jobs or max(int(ray.cluster_resources().get("CPU", 1)), 1)
        left, where = iter(points), str(Path.cwd())
        under_way: dict[Any, tuple[Point, float]] = {}  # with its start time, in the order of start times

        def give(points: Iterable[Point]) -> None:
            for point in points:
                under_way[task.remote(where, measure, point)] = point, monotonic()

        give(islice(left, jobs))
        while under_way:
            longest, (_, began) = next(iter(under_way.items()))
            timeout = None if limit_s is None else max(began + limit_s - monotonic(), 0)
            ready, _ = ray.wait(list(under_way), timeout=timeout)
            done = ready[0] if ready else longest
            point, _ = under_way.pop(done)
            try:
                if ready:
                    yield ray.get(done)
                else:
                    ray.cancel(done, force=True)
                    yield failed(point, OVERDUE)
            except ray.exceptions.RayError:
                yield failed(point, DIED)
            give(islice(left, 1))
    finally:
        if not joined:
            ray.shutdown()


def _measured(where: str, measure: Callable[[Point], RunResult], point: Point) -> RunResult:
    with suppress(OSError):  # a node without this directory finds no files by relative paths
        os.chdir(where)
    return measure(point)
