"""Validation reports on request: the simulator compared with recordings of the real engine, made now if necessary."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from tokentwin.calibration.steps.step_cost import Calibration
from tokentwin.calibration.validation.covalidation import covalidate
from tokentwin.calibration.validation.disturbance import calibrated_deployment
from tokentwin.calibration.validation.report import ValidationReport
from tokentwin.planning.measure.real_engine import check_replays, fitting, load_engines, record_whole
from tokentwin.planning.measure.request import ValidateRequest


def validate(
    request: ValidateRequest, *, overwrite: bool = False, say: Callable[[str], None] = lambda line: None
) -> ValidationReport:
    """Compare the simulator with recordings of the real engine: decisions, step times, and the whole run.

    `say` is called with a line for each real run. Raises UserError if the recordings do not all have the same workload
    and the calibrated engine, and if there are recordings in `out` and `overwrite` is not set.
    """
    calibration = Calibration.load(request.calibration)
    real = request.real or _recorded(request, calibration, overwrite, say)
    return covalidate(real, calibration, request.out, datetime.now(UTC).isoformat(timespec="seconds"))


def _recorded(
    request: ValidateRequest, calibration: Calibration, overwrite: bool, say: Callable[[str], None]
) -> list[Path]:
    """Record the traffic on the calibrated engine, and return the paths of the recordings."""
    workload = request.workload()
    paths = [request.out / f"real-{number}" for number in range(1, request.repeats + 1)]
    deployment = calibrated_deployment(calibration)
    check_replays(workload, deployment, paths, overwrite)
    with closing(load_engines(deployment, say)) as engine:
        workload = fitting(workload, engine, request.minutes, say, request.repeats)
        for number, path in enumerate(paths, start=1):
            say(f"real run {number} of {request.repeats}")
            record_whole(workload, engine, path, overwrite)
    return paths
