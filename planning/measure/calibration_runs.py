"""Measuring an engine for a calibration: designed traces, recorded one after the other, then the fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from calibration.steps.design import Pace, designed_workloads
from calibration.steps.features import MeasuredSteps
from calibration.steps.fit import fit, predict, step_residuals_table
from calibration.steps.step_cost import Calibration
from planning.version import __version__
from serving.workload import Workload
from traces.recording import Recording

if TYPE_CHECKING:
    from realengine.engine import Engine


def pace_of(engine: Engine) -> tuple[int, int]:
    """Rough times of a decode step at half the batch and of one prompt token, ns."""
    config = engine.deployment.scheduler
    rows = max(config.max_num_seqs // 2, 1)
    size = min(config.max_num_batched_tokens, 128)
    decode = min(engine.run_dummy([1] * rows) for _ in range(3))
    prefill = min(engine.run_dummy([size]) for _ in range(3))
    return decode, max(prefill // size, 1)


def measure(engine: Engine, out: Path, seconds: float, record: Callable[[Workload, Path], object]) -> Iterator[Path]:
    """`record` the designed traces into `out`, one at each `next`, so that other runs can go between them."""
    for workload in designed_workloads(engine.deployment.scheduler, Pace(*pace_of(engine)), seconds):
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
