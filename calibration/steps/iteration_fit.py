"""A calibration from a per-iteration log: the fitted correction, and its errors on steps that it has not seen.

Neighbouring steps are alike, so a whole stretch of time is held out: the fit has the first and the last third of the
log, and the middle third is scored.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from calibration.kernels.times import KernelTimes
from calibration.steps.correction import Correction, fit_correction
from calibration.steps.external_calibration import ExternalCalibration
from calibration.steps.features import REGIMES, regimes
from calibration.steps.interval import REACH
from calibration.steps.iteration_log import IterationLog
from calibration.steps.operation_cost import HostTimes
from calibration.steps.parts import step_parts
from serving.deployments.config import Deployment
from serving.deployments.model_spec import ModelSpec

_STRETCHES = 5


@dataclass(frozen=True)
class StepErrors:
    """Absolute errors of held-out steps of one regime, in percent of the measured, and their signed mean by time."""

    steps: int
    median_pct: float
    p95_pct: float
    bias_pct: float


class PricedLog:
    """A log with the parts of every step, so that a correction can be fitted to some steps and scored on others."""

    def __init__(self, log: IterationLog, model: ModelSpec, deployment: Deployment, kernels: KernelTimes) -> None:
        self.log = log
        self.parts = step_parts(model, deployment, kernels, log.sizes)

    def fit(self, chosen: NDArray[np.bool_], source: str) -> Correction:
        """Fit a correction to the steps where `chosen` is true."""
        log = self.log.take(chosen)
        parts = {name: ns[chosen] for name, ns in self.parts.items()}
        return fit_correction(parts, log.sizes, log.measured_ns, source)

    def predict(self, correction: Correction, chosen: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return predicted nanoseconds of the chosen steps."""
        parts = {name: ns[chosen] for name, ns in self.parts.items()}
        return np.sum(list(correction.apply(parts, self.log.take(chosen).sizes).values()), axis=0)

    def score(self, correction: Correction, chosen: NDArray[np.bool_]) -> dict[str, StepErrors]:
        """Return errors by regime of the chosen steps; regimes without steps are left out."""
        log = self.log.take(chosen)
        predicted, regime = self.predict(correction, chosen), regimes(log.sizes)
        errors = {}
        for index, name in enumerate(REGIMES):
            mine = regime == index
            if mine.any():
                error = 100 * np.abs(predicted[mine] / log.measured_ns[mine] - 1)
                total = log.measured_ns[mine].sum()
                errors[name] = StepErrors(
                    steps=int(mine.sum()),
                    median_pct=float(np.median(error)),
                    p95_pct=float(np.percentile(error, 95)),
                    bias_pct=float(100 * (predicted[mine].sum() / total - 1)),
                )
        return errors


def middle_third(log: IterationLog) -> NDArray[np.bool_]:
    """Return a mask of the steps in the middle third of the log in time."""
    return np.asarray(np.arange(len(log)) * 3 // len(log) == 1)


def calibrate_from_log(
    log: IterationLog,
    gpu: str,
    model: ModelSpec,
    deployment: Deployment,
    kernels: KernelTimes,
    source: str,
    created: str,
) -> ExternalCalibration:
    """Return the calibration of the engine that wrote `log`; raise UserError if the log is too short."""
    priced = PricedLog(log, model, deployment, kernels)
    middle = middle_third(log)
    scored = priced.score(priced.fit(~middle, "first and last third"), middle)
    residuals = {name: {**asdict(errors), "steps": float(errors.steps)} for name, errors in scored.items()}
    everything = np.ones(len(log), dtype=np.bool_)
    return ExternalCalibration(
        gpu=gpu,
        deployment=deployment.model_dump_json(),
        correction=priced.fit(everything, source),
        host=HostTimes(),  # a log's latency is from step to step, so it includes CPU time that is not hidden
        interval=_interval(priced),
        source=source,
        created=created,
        residuals=residuals,
    )


def _interval(priced: PricedLog) -> tuple[float, float]:
    """Return the interval of the total time of a fifth of the log that is predicted from the others."""
    stretch = np.arange(len(priced.log)) * _STRETCHES // len(priced.log)
    logs = []
    for index in range(_STRETCHES):
        mine = stretch == index
        predicted = priced.predict(priced.fit(~mine, ""), mine)
        logs.append(np.log(priced.log.measured_ns[mine].sum() / predicted.sum()))
    reach = float(REACH * np.sqrt(np.mean(np.square(logs)) * (1 + 1 / _STRETCHES)))
    return float(np.exp(-reach)), float(np.exp(reach))
