"""A calibration file from a case with an anchor: the correction fitted to one measured run, kept for simulations.

The anchor's factor on decode steps multiplies the time of steps without prompts, and its factor on prompts multiplies
the time that prompts add. Milliseconds outside the engine are left out, because a simulation has no client.
"""

from __future__ import annotations

from dataclasses import replace
from math import log, sqrt
from typing import Any

from tokentwin.calibration.steps.external_calibration import ExternalCalibration, blind
from tokentwin.calibration.steps.interval import REACH, factors_of
from tokentwin.calibration.validation.external.scoring import CaseResult
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.errors import UserError

_FIGURES = ("tpot_ms.mean", "e2e_ms.mean")
_LEAST = 0.02  # minimum standard error of a calibration from a single run


def learnt_from(result: CaseResult, created: str) -> ExternalCalibration:
    """Return the calibration of a scored case's engine; raise UserError if the case has no anchor."""
    case, correction = result.case, result.correction
    if case.anchor is None or correction is None:
        remedy = "is missing; name the run to learn from, and the figures to reproduce"
        raise UserError(f"{case.name}.anchor", None, remedy)
    deployment, _ = case.deployment_of(result.runs[0])
    gpu = result.runs[0].gpu or case.gpu
    start = blind(gpu, deployment)
    return replace(
        start,
        gpu=find_gpu(gpu).name,
        deployment=deployment.model_dump_json(),
        correction=replace(
            start.correction.scaled(correction.decode, correction.prefill), source=f"{case.name}, run {case.anchor.run}"
        ),
        host=start.host.scaled(correction.decode),
        **_intervals(result),
        source=f"{case.title}, run {case.anchor.run}; before that {start.source}",
        created=created,
    )


def _intervals(result: CaseResult) -> dict[str, Any]:
    """Return the intervals from the anchored column's errors on the other runs; empty if there are none."""
    errors = [row.error_pct("anchored") for row in result.rows if row.figure in _FIGURES]
    logs = [log(1 + error / 100) for error in errors if error is not None and error > -100]
    if not logs:
        return {}
    reach = REACH * max(sqrt(sum(x * x for x in logs) / len(logs)), _LEAST)
    return {"interval": factors_of(reach), "prompt_interval": None}
