"""A sweep as a whole: it makes the requested runs that do not exist yet."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from tokentwin.planning.learn.front_door import learnt_front_door
from tokentwin.planning.progress import Tell, quiet
from tokentwin.planning.sweep.columns import parameter_fields, parameter_values, partition_keys, run_schema
from tokentwin.planning.sweep.dataset import FORMAT, SweepDataset
from tokentwin.planning.sweep.executors import Executor
from tokentwin.planning.sweep.one_run import Measure, RunResult
from tokentwin.planning.sweep.points import Point, canonical, input_digests, points
from tokentwin.planning.sweep.settings import SweepSettings
from tokentwin.serving.errors import UserError
from tokentwin.serving.version import __version__


@dataclass(frozen=True)
class Swept:
    """The outcome of a sweep.

    Attributes:
        made: number of runs made now
        kept: number of runs kept from before
        failed: number of failed runs among all requested runs
        first_error: error of the first failed run
    """

    made: int
    kept: int
    failed: int
    first_error: str


@dataclass(frozen=True)
class Sweep:
    """A sweep of a settings file: its runs, and the columns of their rows."""

    settings: SweepSettings
    points: Sequence[Point]
    schema: pa.Schema
    partition: Sequence[str]

    @classmethod
    def from_settings(cls, settings: SweepSettings) -> Sweep:
        """Return the sweep of `settings`. Raises UserError if it cannot be made."""
        runs = points(settings)
        schema = run_schema(runs, settings.bands)
        return cls(settings, runs, schema, partition_keys(settings.partition, runs, schema))

    @property
    def defaults(self) -> list[str]:
        """The settings that runs leave to their engines, with their values; one line for each engine on each GPU."""
        return list(dict.fromkeys(line for point in self.points for line in point.defaults))

    @property
    def seen_by(self) -> list[str]:
        """A sentence for each twin of a server, which says that latencies are those that its clients see."""
        twins = dict.fromkeys(point.config.get("calibration") for point in self.points)
        return [door.said for door in map(learnt_front_door, twins) if door is not None]

    def run(
        self, out: Path, executor: Executor, *, resume: bool = False, retry_failed: bool = False, tell: Tell = quiet
    ) -> Swept:
        """Make the runs that the dataset `out` lacks. If interrupted, it leaves a dataset that can be read and resumed.

        If `resume` is not set, there must be no dataset yet. If `retry_failed` is set, failed runs are made again.
        Raises UserError if `out` holds something else. If no run can be made, it raises UserError and removes a new
        dataset.
        """
        settings = self.settings
        measure = Measure(full=settings.full_metrics, requests=settings.per_request, bands=settings.bands)
        with closing(SweepDataset(out, self._about(), self.schema, self.partition, resume=resume)) as dataset:
            there = {run for run, error in dataset.errors().items() if error is None or not retry_failed}
            missing = [point for point in self.points if point.id not in there]
            refused: dict[str, UserError] = {}
            try:
                with closing(executor(measure, missing)) as results:
                    for made, result in enumerate(results, len(self.points) - len(missing) + 1):
                        dataset.add(self._row(result), result.requests)
                        if result.refused:
                            refused[result.point.id] = result.refused
                        tell(f"{made:,} of {len(self.points):,} runs", made / len(self.points))
            finally:
                dataset.fold()
            if refused and all(point.error or point.id in refused for point in self.points):
                dataset.discard()
                raise next(refused[point.id] for point in self.points if point.id in refused)
            return self._result(dataset, len(missing))

    def _about(self) -> dict[str, Any]:
        """Return the data that all rows of a dataset share."""
        return {
            "format": FORMAT,
            "version": __version__,
            "base": self.settings.base,
            "varied": {path: field.name for path, field in parameter_fields(self.schema).items()},
            "columns": {field.name: str(field.type) for field in self.schema},
            "partition": list(self.partition),
            "per_request": self.settings.per_request,
            "full_metrics": self.settings.full_metrics,
            "bands": self.settings.bands,
            "inputs": input_digests(list(self.points)),
        }

    def _row(self, result: RunResult) -> dict[str, Any]:
        point = result.point
        origin = {"run_id": point.id, "config": canonical(point.config), "version": __version__}
        return {**parameter_values(point, self.schema), **origin, **result.values}

    def _result(self, dataset: SweepDataset, made: int) -> Swept:
        known = dataset.errors()
        errors = [error for point in self.points if (error := known[point.id]) is not None]
        return Swept(made, len(self.points) - made, len(errors), errors[0] if errors else "")
