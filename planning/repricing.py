"""The calibrations that can time the steps of a recorded run again.

A simulated run names the id of its calibration, which belongs to our own engine, to another engine on a GPU, or to the
bundled kernel tables of a GPU alone. A real run names no calibration; any calibration of the same engine can be used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokentwin.calibration.steps.external_calibration import LEARNT_FILES
from tokentwin.calibration.steps.step_cost import Calibration
from tokentwin.planning.costs import Priced, priced
from tokentwin.planning.resolution import calibration_in
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.gpu_spec import gpus
from tokentwin.serving.errors import UserError
from tokentwin.traces.recording import notes_of


class Source(NamedTuple):
    """A calibration (a directory) and a GPU, as `costs.priced` takes them; at most one of them is None."""

    calibration: str | None
    gpu: str | None


def source_of(run: Mapping[str, Any], calibrations: Iterable[Path]) -> Source | None:
    """Return the source that timed a simulated run, among `calibrations` and the bundled tables.

    `run` is the run's row of `runs`. Returns None if no source fits. Damaged calibrations are skipped.
    """
    from tokentwin.calibration.kernels.surfaces import bundled_names
    from tokentwin.calibration.steps.external_calibration import identity

    wanted = run["calibration"]
    if not wanted:
        return None
    noted = notes_of(run).get("gpu")
    if noted in gpus():
        if identity(noted) == wanted:
            return Source(None, noted)
    else:  # GPUs without their own tables share one id, so the id does not identify the GPU
        for name in bundled_names():
            if identity(name) == wanted:
                return Source(None, name)
    for directory in calibrations:
        try:
            learnt = calibration_in(directory)
            if isinstance(learnt, Calibration):
                if learnt.id == wanted:
                    return Source(str(directory), None)
                continue
            gpu = noted if noted in gpus() else learnt.gpu
            if identity(gpu, learnt) == wanted:
                return Source(str(directory), gpu)
        except UserError:
            continue
    return None


def fitting_sources(deployment: Deployment, calibrations: Iterable[Path]) -> list[Source]:
    """Return the `calibrations` of our own engine for this deployment; scheduler settings and policy may differ."""
    sources = []
    for directory in calibrations:
        if any((directory / name).exists() for name in LEARNT_FILES):
            continue
        try:
            priced(str(directory), None, deployment)
        except UserError:
            continue
        sources.append(Source(str(directory), None))
    return sources


def repriced(source: Source, deployment: Deployment) -> Priced:
    """Return the cost model of `deployment` without its fleet, from `source`.

    Raises UserError if they do not go together.
    """
    return priced(*source, deployment.model_copy(update={"fleet": None}))
