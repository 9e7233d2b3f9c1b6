"""Where the step times of a twin come from: kernel times of a known GPU, which are corrected, or free linear prices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokentwin.calibration.operations import StepSizes
from tokentwin.calibration.steps.correction import Correction, fit_correction, step_parts
from tokentwin.calibration.steps.external_calibration import FILE as ENGINE
from tokentwin.calibration.steps.external_calibration import ExternalCalibration, kernels
from tokentwin.calibration.steps.features import MeasuredSteps, feature_rows
from tokentwin.calibration.steps.fit import fit
from tokentwin.calibration.steps.interval import Factors
from tokentwin.calibration.steps.iteration_fit import IterationLog
from tokentwin.calibration.steps.launches import UNKNOWN, LaunchCost
from tokentwin.calibration.steps.operation_cost import HostTimes, OperationCost
from tokentwin.calibration.steps.step_cost import Calibration, StepCost
from tokentwin.planning.learn.answers import Answer
from tokentwin.planning.learn.seen_steps import decode_steps, joined
from tokentwin.serving.cost_model import CostModel
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.engines import captured_tokens
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.errors import UserError
from tokentwin.serving.step_plan import AGGREGATES
from tokentwin.serving.version import __version__

_FEWEST = 20  # minimum number of steps
_LAUNCH_SCALES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.4, 1.6, 1.8, 2.0)
_BOUND = 0.95  # share of a step's time from which on its launches are its limit
_WORST = 0.2  # larger errors count no more than this one
_UNLIKELY = 0.002  # error that a launch cost e times the believed one must save
_FEWEST_LIMITED = 3  # minimum number of steps limited by their launches that correct the launch cost
_FEWEST_PRICED = 100  # minimum number of steps for a fit of prices; fewer steps are repeated


class Known(NamedTuple):
    """What a saved calibration says of itself: its source, its date, and its 90 % interval of step times."""

    source: str
    created: str
    interval: Factors
    request_ms: float


class StepTimes(Protocol):
    """The step times of a twin, which can be fitted to measured steps."""

    def cost(self, deployment: Deployment) -> CostModel:
        """Return the cost model of `deployment`."""
        ...

    def ns(self, sizes: StepSizes, deployment: Deployment) -> NDArray[np.float64]:
        """Return the duration of each step in `sizes`."""
        ...

    def fitted(self, log: IterationLog, deployment: Deployment, fit_launches: bool) -> Self:
        """Return step times fitted to `log`, close to these. Without `fit_launches` launches cost what they do here."""
        ...

    def with_launches_of(self, other: Self) -> Self:
        """Return these step times with the launch cost of `other`."""
        ...

    def scaled(self, factor: float) -> Self:
        """Return all step times multiplied by `factor`."""
        ...

    def save(self, folder: Path, deployment: Deployment, known: Known) -> None:
        """Write the calibration into `folder`; a failed write leaves no partial file."""
        ...


@dataclass(frozen=True)
class CorrectedKernels:
    """Kernel times of `gpu`, corrected by `correction`; `launches` is the cost of launches outside of CUDA graphs."""

    gpu: str
    correction: Correction
    launches: LaunchCost = UNKNOWN

    def cost(self, deployment: Deployment) -> OperationCost:
        host = HostTimes(launches=self.launches)
        return OperationCost(find_model(deployment.model), deployment, kernels(self.gpu), self.correction, host)

    def ns(self, sizes: StepSizes, deployment: Deployment) -> NDArray[np.float64]:
        return np.asarray(sum(self.cost(deployment).parts(sizes).values()))

    def fitted(self, log: IterationLog, deployment: Deployment, fit_launches: bool) -> CorrectedKernels:
        """Return the correction and the launch cost that explain `log` best, close to these.

        A step whose launches take as long as it did says nothing about its kernels and is left out. The launch cost is
        the one of several that leaves the smallest errors, corrected by the steps that it limits.
        """
        cost = self.cost(deployment)
        parts = step_parts(cost.model, deployment, cost.kernels, log.sizes)
        captured = captured_tokens(deployment, cost.kernels.gpu)
        launching = np.broadcast_to(cost.launching_ns(log.sizes, captured), log.measured_ns.shape)
        scales = _LAUNCH_SCALES if fit_launches and np.any(launching > 0) else (1.0,)
        tried = [self._tried(log, parts, launching, scale) for scale in scales]
        error, scale, best = min(tried, key=lambda one: one[0])
        if not np.isfinite(error):
            raise UserError("steps", len(log), "were timed, which are too few; ask more questions")
        close = np.abs(np.log(np.maximum(scale * launching, 1.0) / log.measured_ns)) < 1 - _BOUND
        limited = close & (launching > 0)
        if len(scales) > 1 and limited.sum() >= _FEWEST_LIMITED:
            finer = float(np.median(log.measured_ns[limited] / launching[limited]))
            best = min((error, scale, best), self._tried(log, parts, launching, finer), key=lambda one: one[0])[2]
        return best

    def _tried(
        self, log: IterationLog, parts: dict[str, NDArray[np.float64]], launching: NDArray[np.float64], scale: float
    ) -> tuple[float, float, CorrectedKernels]:
        """Return the mean error with a launch cost `scale` times this one, `scale`, and the fitted step times."""
        free = scale * launching < _BOUND * log.measured_ns
        rest = log.take(free)
        if len(rest) < _FEWEST:
            return float("inf"), scale, self
        chosen = {name: ns[free] for name, ns in parts.items()}
        correction = fit_correction(chosen, rest.sizes, rest.measured_ns, "questions", self.correction)
        device = sum(correction.apply(parts, log.sizes).values())
        errors = np.abs(np.log(np.maximum(device, scale * launching) / log.measured_ns))
        error = float(np.minimum(errors, _WORST).mean()) + _UNLIKELY * abs(float(np.log(scale)))
        return error, scale, replace(self, correction=correction, launches=self.launches.scaled(scale))

    def with_launches_of(self, other: CorrectedKernels) -> CorrectedKernels:
        return replace(self, launches=other.launches)

    def scaled(self, factor: float) -> CorrectedKernels:
        return replace(self, correction=self.correction.scaled(factor, factor), launches=self.launches.scaled(factor))

    def save(self, folder: Path, deployment: Deployment, known: Known) -> None:
        ExternalCalibration(
            gpu=kernels(self.gpu).gpu.name,
            deployment=deployment.model_dump_json(),
            correction=self.correction,
            host=HostTimes(launches=self.launches),
            interval=known.interval,
            source=known.source,
            created=known.created,
            request_ms=known.request_ms,
        ).save(folder)


@dataclass(frozen=True)
class LinearPrices:
    """Linear prices of a step's features, for a device without kernel times."""

    calibration: Calibration

    @classmethod
    def guessed(cls, lone: Answer, calm: Sequence[Answer], deployment: Deployment) -> LinearPrices:
        """Return prices from decode steps and from lone prompts, each of which counts as one step."""
        prompts = np.array([one.prompt_len for one in lone.as_sent.requests], dtype=np.float64)
        first_ns = [lone.tokens_ns[one.id][0] - lone.sent_ns[one.id] for one in lone.as_sent.requests]
        ones, zeros = np.ones_like(prompts), np.zeros_like(prompts)
        columns = dict.fromkeys((*AGGREGATES, "decode_spread"), zeros)
        columns |= {"prefill_rows": ones, "prefill_tokens": prompts, "sampled_rows": ones}
        columns["prefill_pairs"] = prompts * (prompts + 1) / 2
        whole = IterationLog(StepSizes(**columns), np.array(first_ns, dtype=np.float64))
        return cls(_calibration(joined([whole, *map(decode_steps, calm)]), deployment))

    def cost(self, deployment: Deployment) -> StepCost:
        return StepCost(self.calibration, deployment)

    def ns(self, sizes: StepSizes, deployment: Deployment) -> NDArray[np.float64]:
        known = self.calibration
        features = feature_rows(sizes, known.drafts, knees=known.knees)
        return np.asarray(features @ np.array([known.step_prices_ps[name] / 1000 for name in known.features]))

    def fitted(self, log: IterationLog, deployment: Deployment, fit_launches: bool) -> LinearPrices:
        """Return prices fitted to `log`; they do not depend on these prices."""
        if len(log) < _FEWEST:
            raise UserError("steps", len(log), "were timed, which are too few; ask more questions")
        return LinearPrices(_calibration(log, deployment))

    def with_launches_of(self, other: LinearPrices) -> LinearPrices:
        """Return these prices, in which launches have no price of their own."""
        return self

    def scaled(self, factor: float) -> LinearPrices:
        return LinearPrices(StepCost(self.calibration).scaled(factor).calibration)

    def save(self, folder: Path, deployment: Deployment, known: Known) -> None:
        made = replace(
            self.calibration,
            deployment=deployment.model_dump_json(),
            created=known.created,
            interval=known.interval,
            hardware={"learnt": known.source},
        )
        made.save(folder)


def load_times(folder: Path) -> StepTimes:
    """Read the step times that `StepTimes.save` wrote. Raises UserError if there are none."""
    if not (folder / ENGINE).exists():
        return LinearPrices(Calibration.load(folder))
    known = ExternalCalibration.load(folder / ENGINE)
    return CorrectedKernels(known.gpu, known.correction, known.host.launches)


def _calibration(log: IterationLog, deployment: Deployment) -> Calibration:
    """Return prices fitted to the steps of a log, one after another."""
    repeats = -(-_FEWEST_PRICED // len(log))
    durations = np.tile(np.maximum(log.measured_ns, 1.0), repeats).round().astype(np.int64)
    ends = np.cumsum(durations)
    columns = {name: np.tile(np.asarray(getattr(log.sizes, name), dtype=np.int64), repeats) for name in AGGREGATES}
    times = {"plan_ns": ends - durations, "start_ns": ends - durations, "end_ns": ends}
    steps = MeasuredSteps([pa.table(columns | times)], drafts=False)
    stated = deployment.model_dump_json()
    return fit(steps, deployment=stated, hardware={}, version=__version__, created="", noise={})
