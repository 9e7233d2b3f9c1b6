"""How far to trust many steps at once: the rule of `calibration.explanation`, over arrays of sizes.

`explain` says which part of one step is known worst; here only how well the whole is known, of as many steps as it
takes to draw a map of a deployment.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibration.explanation import NEGLIGIBLE
from calibration.kernel_times import Mark
from calibration.operation_cost import OperationCost
from calibration.operations import StepSizes
from calibration.step_correction import domain_amounts

Floats = NDArray[np.float64]


class StepMarks(NamedTuple):
    """Of every step, in the shape of its sizes.

    mark    a `Mark`: validated where measured steps cover it, extrapolated where a telling kernel is
    sigma   standard error of the logarithm of its kernels' time, were all of them off alike
    """

    mark: NDArray[np.int64]
    sigma: Floats


def step_marks(cost: OperationCost, sizes: StepSizes) -> StepMarks:
    """The marks of steps; `sizes` are arrays of one shape."""
    step_ns = np.sum(list(cost.parts(sizes).values()), axis=0)
    mark = np.zeros(step_ns.shape, dtype=np.int64)
    kernels_ns, error_ns = np.zeros(step_ns.shape), np.zeros(step_ns.shape)
    for operation in cost.operations(sizes):
        time = cost.kernels.time(operation)
        ns = np.where(np.asarray(operation.size) > 0, operation.count * time.ns, 0.0)
        telling = (time.sigma * ns >= NEGLIGIBLE * step_ns) & (ns > 0)
        mark = np.maximum(mark, np.where(telling, time.mark, Mark.VALIDATED))
        kernels_ns += ns
        error_ns += time.sigma * ns
    mark = np.where(_covered(cost, sizes), Mark.VALIDATED, np.maximum(mark, Mark.INTERPOLATED))
    return StepMarks(mark, error_ns / np.maximum(kernels_ns, 1e-9))


def _covered(cost: OperationCost, sizes: StepSizes) -> NDArray[np.bool_]:
    """Whether steps of these amounts were among those that the correction was fitted to."""
    domain = cost.correction.domain
    amounts = {name: np.asarray(values) for name, values in domain_amounts(sizes).items()}
    inside = [(values >= domain[name][0]) & (values <= domain[name][1]) for name, values in amounts.items() if domain]
    return np.logical_and.reduce(inside) if inside else np.zeros(amounts["tokens"].shape, dtype=bool)
