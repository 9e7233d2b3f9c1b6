"""The steps and the settings of a server that records itself, from its recording, while it still runs or after it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tokentwin.calibration.operations import StepSizes
from tokentwin.calibration.steps.iteration_fit import IterationLog
from tokentwin.planning.deployments import stated_deployment
from tokentwin.planning.learn.twin import Setting
from tokentwin.serving.errors import UserError
from tokentwin.serving.step_plan import AGGREGATES
from tokentwin.traces.live_recording import entries
from tokentwin.traces.recording import JOURNAL, Recording
from tokentwin.traces.recording_writer import DEPLOYMENT

_TIMES = ("plan_ns", "end_ns")


def recorded_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of `Setting` that the recorder wrote beside its recording.

    Raises UserError if the folder has no deployment.
    """
    deployment = stated_deployment(folder / DEPLOYMENT)
    if deployment.scheduler.num_blocks is None:
        raise UserError("recorder", str(folder), "states no KV blocks; is it the recording of a server that runs?")
    return Setting.of(deployment)._asdict()


def recorded_steps(folder: Path) -> IterationLog:
    """Return the steps that the recorder wrote so far, each from the end of the step before it, or from its plan.

    Raises UserError if there are none.
    """
    rows = _rows(folder)
    if not rows:
        raise UserError("recorder", str(folder), "holds no steps; does the server write its recording there?")
    names = (*AGGREGATES, *_TIMES)
    columns = {name: np.array([row.get(name) or 0 for row in rows], dtype=np.float64) for name in names}
    order = np.argsort(columns["end_ns"], kind="stable")
    columns = {name: values[order] for name, values in columns.items()}
    begins = np.maximum(columns["plan_ns"][1:], columns["end_ns"][:-1])
    sizes = StepSizes(**{name: columns[name][1:] for name in AGGREGATES}, decode_spread=np.zeros(len(begins)))
    return IterationLog(sizes, np.maximum(columns["end_ns"][1:] - begins, 1.0))


def _rows(folder: Path) -> list[Mapping[str, Any]]:
    if not folder.is_dir() or not any((folder / name).is_file() for name in (JOURNAL, "runs.parquet")):
        raise UserError("recorder", str(folder), "holds no recording; does the server write its recording there?")
    if (folder / JOURNAL).is_file():
        return [row for kind, row in entries(folder / JOURNAL) if kind == "step"]
    return list(Recording.load(folder).table("steps").select([*AGGREGATES, *_TIMES]).to_pylist())
