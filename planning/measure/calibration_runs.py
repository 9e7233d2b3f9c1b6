"""Measuring an engine for a calibration: designed traces, recorded one after the other, then the fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from calibration.steps.design import designed_workloads
from calibration.steps.features import MeasuredSteps
from calibration.steps.fit import fit, predict, step_residuals_table
from calibration.steps.step_cost import Calibration
from planning.measure.real_engine import pace_of
from planning.version import __version__
from serving.workload import Workload
from traces.recording import Recording

if TYPE_CHECKING:
    from realengine.engine import Engine


def measure(engine: Engine, out: Path, seconds: float, record: Callable[[Workload, Path], object]) -> Iterator[Path]:
    """`record` the designed traces into `out`, one at each `next`, so that other runs can go between them."""
    for workload in designed_workloads(engine.deployment.scheduler, pace_of(engine), seconds):
        path = out / "runs" / workload.name
        record(workload, path)
        yield path


def fit_recordings(paths: list[Path], out: Path) -> Calibration:
    """Fit a calibration to recordings of one deployment and save it in `out`."""
    runs = [Recording.load(path) for path in paths]
    steps = MeasuredSteps([run.steps for run in runs])
    notes = [json.loads(run.run["notes"]) for run in runs]
    calibration = fit(
        steps,
        deployment=runs[0].run["deployment"],
        hardware=json.loads(runs[0].run["hardware"]),
        version=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        noise={"canary_ns": [note[key] for note in notes for key in ("canary_before_ns", "canary_after_ns")]},
    )
    calibration.save(out)
    pq.write_table(step_residuals_table(steps, predict(calibration, steps)), out / "steps.parquet")
    return calibration
