"""The trust in the predicted time of steps.

The trust in a step is that in its most uncertain kernel that matters. A kernel matters if its standard error is not
negligible compared with the time of the step.

For a calibration of our own engine, the functions here find the steps outside the measured domain, and their distance
from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import NamedTuple

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from tokentwin.calibration.operations import StepSizes
from tokentwin.calibration.steps.correction import domain_amounts, never_slower
from tokentwin.calibration.steps.features import REGIMES, Floats, recorded_sizes
from tokentwin.calibration.steps.interval import REACH, StepInterval, widened
from tokentwin.calibration.steps.launches import FITTED
from tokentwin.calibration.steps.operation_cost import WAITING, OperationCost
from tokentwin.calibration.steps.step_cost import Calibration
from tokentwin.calibration.trust import EXTRAPOLATED, UNKNOWN, VALIDATED, Trust, TrustLevel
from tokentwin.serving.answers.figures import shown_share
from tokentwin.serving.step_plan import AGGREGATES
from tokentwin.traces.recording import Recording


def beyond(calibration: Calibration, features: Floats, regime: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return True for each feature of each step that lies outside its measured range in the step's regime.

    `features` and the result are `[steps, features]`.
    """
    out = np.ones(features.shape, dtype=bool)  # every feature is outside in a regime that was not measured
    for index, name in enumerate(REGIMES):
        ranges = calibration.domain.get(name)
        if ranges is not None:
            mine = regime == index
            low, high = (np.array([ranges[feature][end] for feature in calibration.features]) for end in (0, 1))
            out[mine] = (features[mine] < low) | (features[mine] > high)
    return out


def first_reason(calibration: Calibration, out: NDArray[np.bool_], regime: NDArray[np.int64]) -> str:
    """Return the most frequent reason why steps are outside the domain; empty if none is outside.

    An example is `query-key pairs of prompts, in mixed steps`. `out` is the result of `beyond`.
    """
    outside = np.flatnonzero(out.any(axis=1))
    if not len(outside):
        return ""
    meanings = list(calibration.features.values())
    reasons = [f"{meanings[out[at].argmax()]}, in {REGIMES[regime[at]]} steps" for at in outside]
    return max(sorted(set(reasons)), key=reasons.count)


def factor_beyond(ranges: Mapping[str, tuple[float, float]], amounts: Mapping[str, Floats]) -> Floats:
    """Return the largest ratio by which an amount exceeds its measured range; 1 inside the ranges.

    The amounts are arrays of one shape.
    """
    factors = [np.ones(np.broadcast_shapes(*(np.shape(values) for values in amounts.values())))]
    for name, values in amounts.items():
        low, high = ranges[name]
        with np.errstate(divide="ignore", invalid="ignore"):
            factors += [np.where(values > high, values / high, 1.0), np.where(values < low, low / values, 1.0)]
    return np.maximum.reduce(np.broadcast_arrays(*factors))


NEGLIGIBLE = 0.01  # share of the step's time; a kernel with a smaller standard error does not matter
_AT_ONCE = 100_000  # steps


class StepTrust(NamedTuple):
    """The trust in every step; arrays have the shape of the step sizes.

    Attributes:
        kernels: `TrustLevel` of the worst kernel that matters
        worst: index in `names` of the worst kernel that matters; -1 if no kernel matters
        covered: True if measured steps cover the step
        sigma: standard error of the logarithm of the kernels' total time, if all kernels err in the same direction
        beyond: half-width of the 90 % interval of the log time from extrapolated kernels alone, if they err in the same
            direction
    """

    kernels: NDArray[np.int64]
    worst: NDArray[np.int64]
    names: list[str]
    covered: NDArray[np.bool_]
    sigma: Floats
    beyond: Floats

    @property
    def level(self) -> NDArray[np.int64]:
        """The `TrustLevel` of the step: validated only where measured steps cover it."""
        return np.where(self.covered, TrustLevel.VALIDATED, np.maximum(self.kernels, TrustLevel.INTERPOLATED))

    def worst_alone(self) -> StepTrust:
        """Return the trust in the most uncertain step alone."""
        at = [int(self.level.argmax())]
        return self._replace(**{name: values[at] for name, values in self._asdict().items() if name != "names"})


def step_trust(cost: OperationCost, sizes: StepSizes) -> StepTrust:
    """Return the trust in the steps of `sizes` (arrays of one shape)."""
    parts = cost.parts(sizes)
    step_ns = np.sum(list(parts.values()), axis=0)
    shape = step_ns.shape
    level, worst = np.full(shape, -1), np.full(shape, -1)
    worst_ns, kernels_ns, error_ns, beyond_ns = (np.zeros(shape) for _ in range(4))
    operations = cost.operations(sizes)
    for at, operation in enumerate(operations):
        time = never_slower(operation, cost.kernels)
        ns = np.where(np.asarray(operation.size) > 0, operation.count * time.ns, 0.0)
        error = time.sigma * ns
        telling = (error >= NEGLIGIBLE * step_ns) & (ns > 0)
        worse = telling & ((time.level > level) | (time.level == level) & (error > worst_ns))
        level, worst = np.where(worse, time.level, level), np.where(worse, at, worst)
        worst_ns = np.where(worse, error, worst_ns)
        kernels_ns += ns
        error_ns += error
        beyond_ns += np.where(time.level == TrustLevel.EXTRAPOLATED, error, 0.0)
    covered = _covered(cost, sizes)
    if WAITING in parts:  # the step waits for launches
        known = cost.host.launches
        guessed = cost.deployment.enforce_eager and known.source == FITTED  # fitted to steps with prompts only
        of_launches = TrustLevel.EXTRAPOLATED if guessed else TrustLevel.INTERPOLATED
        waits = parts[WAITING] > NEGLIGIBLE * step_ns
        worst = np.where(waits & (of_launches >= level), len(operations), worst)
        level = np.where(waits, np.maximum(level, of_launches), level)
        uncertain = np.where(waits, known.sigma * step_ns, 0.0)
        covered &= ~waits
        kernels_ns, error_ns = kernels_ns + parts[WAITING], error_ns + uncertain
    whole_ns = np.maximum(kernels_ns, 1e-9)
    return StepTrust(
        kernels=np.maximum(level, TrustLevel.EXTRAPOLATED if cost.untaught else TrustLevel.VALIDATED),
        worst=worst,
        names=[*(operation.name for operation in operations), WAITING],
        covered=covered,
        sigma=error_ns / whole_ns,
        beyond=REACH * beyond_ns / whole_ns,
    )


def stacked(steps: Sequence[StepSizes]) -> StepSizes:
    """Return steps of plain numbers as one `StepSizes` of arrays."""
    return StepSizes(*np.array([astuple(step) for step in steps], dtype=np.float64).T)


NEGLIGIBLE_STEPS = 0.01  # share of extrapolated steps up to which a run does not count as extrapolated


def run_level(levels: NDArray[np.int64], weights: Floats) -> TrustLevel:
    """Return the trust level of a run with steps of these levels; `weights` has the number of times each occurs."""
    worst = TrustLevel(int(levels.max()))
    if worst < TrustLevel.EXTRAPOLATED:
        return worst
    share = float(weights[levels >= TrustLevel.EXTRAPOLATED].sum() / weights.sum())
    return TrustLevel.INTERPOLATED if share <= NEGLIGIBLE_STEPS else worst


def trust_within(cost: OperationCost, corners: Sequence[StepSizes]) -> Trust:
    """Return the trust in all steps that are no larger than `corners` (steps of plain numbers).

    No such step is more uncertain than the most uncertain corner.
    """
    if not corners:
        return Trust(UNKNOWN, "no step was priced")
    return worst_trust(cost, step_trust(cost, stacked(corners)))


def worst_trust(cost: OperationCost, steps: StepTrust) -> Trust:
    """Return the trust in the most uncertain of the steps, with the part that is the reason."""
    if steps.covered.all():
        return Trust(VALIDATED, f"measured steps cover it ({cost.correction.source})")
    if cost.untaught:
        return Trust(EXTRAPOLATED, cost.untaught)
    at = int(steps.kernels.argmax())
    worst, index = TrustLevel(int(steps.kernels[at])), int(steps.worst[at])
    name = steps.names[index] if index >= 0 else ""
    reason = f"launches take {cost.host.launches}" if name == WAITING else f"{worst.clause} (least certain: {name})"
    return Trust(max(worst, TrustLevel.INTERPOLATED).word, reason)


def interval_of(cost: OperationCost, corners: Sequence[StepSizes]) -> StepInterval:
    """Return the interval of steps no larger than `corners`: the known one, widened for extrapolated kernels."""
    beyond = {False: 0.0, True: 0.0}  # error of decode steps, and of steps with prompts
    if corners:
        sizes = stacked(corners)
        for has_prompts, reach in zip(sizes.prefill_tokens > 0, step_trust(cost, sizes).beyond, strict=True):
            beyond[bool(has_prompts)] = max(beyond[bool(has_prompts)], float(reach))
    decode, prompts = cost.known_interval
    return StepInterval(widened(decode, beyond[False]), widened(prompts, beyond[True]))


class Beyond(NamedTuple):
    """The part of a run outside the measured domain, as a share of its steps and as a share of their time."""

    steps: float
    time: float

    @classmethod
    def from_steps(cls, out: NDArray[np.bool_], took_ns: Floats) -> Beyond:
        return cls(float(out.mean()) if out.size else 0.0, float(took_ns[out].sum() / max(took_ns.sum(), 1.0)))

    def __str__(self) -> str:
        return f"{shown_share(self.steps, 1)} of the steps and {shown_share(self.time, 1)} of their time"


def recorded_beyond(cost: OperationCost, recording: Recording) -> Beyond | None:
    """Return the extrapolated part of a recording; None if it has no steps."""
    out, took_ns = [], []
    for steps in recording.pieces("steps", ["start_ns", "end_ns", *AGGREGATES], _AT_ONCE):
        out.append(step_trust(cost, recorded_sizes(steps)).level >= TrustLevel.EXTRAPOLATED)
        took_ns.append(pc.subtract(steps["end_ns"], steps["start_ns"]).cast("float64").to_numpy())
    return Beyond.from_steps(np.concatenate(out), np.concatenate(took_ns)) if out else None


def _covered(cost: OperationCost, sizes: StepSizes) -> NDArray[np.bool_]:
    """Return True for each step whose amounts lie within the domain that the correction was fitted to."""
    domain = cost.correction.domain
    amounts = {name: np.asarray(values) for name, values in domain_amounts(sizes).items()}
    inside = [(values >= domain[name][0]) & (values <= domain[name][1]) for name, values in amounts.items() if domain]
    return np.logical_and.reduce(inside) if inside else np.zeros(amounts["tokens"].shape, dtype=bool)
