"""What can time the steps of a recorded run again: the calibration behind it, found by its id.

A simulated run names the id of what timed it. That is a calibration of our own engine, one of another engine on a GPU,
or the bundled kernel tables of a GPU alone. A real run names none: any calibration of the same engine will do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from calibration.steps.external_calibration import FILE, ExternalCalibration
from planning.costs import Priced, calibration_in, priced
from serving.deployments.config import Deployment
from serving.deployments.gpu_spec import gpus
from serving.errors import UserError
from traces.recording_notes import notes_of


class Source(NamedTuple):
    """A calibration (a directory) and a GPU, as `costs.priced` takes them; either may be None, not both."""

    calibration: str | None
    gpu: str | None


def source_of(run: Mapping[str, Any], calibrations: Iterable[Path]) -> Source | None:
    """What timed a simulated run, among `calibrations` and the bundled tables; None if it is none of them.

    `run` is its row of `runs`. A damaged calibration is passed over.
    """
    from calibration.kernels.surfaces import bundled_names
    from calibration.steps.predict import identity

    wanted = run["calibration"]
    if not wanted:
        return None
    noted = notes_of(run).get("gpu")
    if noted in gpus():
        if identity(noted) == wanted:
            return Source(None, noted)
    else:  # GPUs without tables of their own have one id together, and cannot be told apart by it
        for name in bundled_names():
            if identity(name) == wanted:
                return Source(None, name)
    for directory in calibrations:
        try:
            learnt = calibration_in(directory)
            if isinstance(learnt, ExternalCalibration):
                gpu = noted if noted in gpus() else learnt.gpu
                if identity(gpu, learnt) == wanted:
                    return Source(str(directory), gpu)
            elif learnt.id == wanted:
                return Source(str(directory), None)
        except UserError:
            continue
    return None


def fitting_sources(deployment: Deployment, calibrations: Iterable[Path]) -> list[Source]:
    """The `calibrations` of our own engine that were measured with this deployment, scheduler and policy aside."""
    found = []
    for directory in calibrations:
        if (directory / FILE).exists():
            continue
        try:
            priced(str(directory), None, deployment)
        except UserError:
            continue
        found.append(Source(str(directory), None))
    return found


def repriced(source: Source, deployment: Deployment) -> Priced:
    """The cost model of `deployment`, its fleet aside, by `source`. Raises UserError when they do not go together."""
    return priced(*source, deployment.model_copy(update={"fleet": None}))
