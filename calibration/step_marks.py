"""How far to trust many steps at once: the rule of `calibration.explanation`, over arrays of sizes.

`explain` says which part of one step is known worst; here only how well the whole is known, of as many steps as it
takes to draw a map of a deployment.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from calibration.explanation import NEGLIGIBLE
from calibration.kernel_times import Mark
from calibration.operation_cost import OperationCost
from calibration.operations import StepSizes
from calibration.step_correction import domain_amounts
from traces.recording import Recording

Floats = NDArray[np.float64]
_AT_ONCE = 100_000  # steps
SIZE_COLUMNS = (
    "prefill_rows", "prefill_tokens", "prefill_context", "prefill_pairs", "decode_rows", "decode_context",
    "sampled_rows", "draft_tokens",
)  # fmt: skip


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


def recorded_sizes(steps: pa.Table) -> StepSizes:
    """The steps of a recording, as arrays. How uneven decode rows were is not recorded; they are taken for equal."""
    recorded = {name: steps[name].cast(pa.float64()) for name in SIZE_COLUMNS}
    amounts = {name: pc.fill_null(values, 0.0).to_numpy() for name, values in recorded.items()}
    return StepSizes(**{**amounts, "decode_context": amounts["decode_context"] + amounts["decode_rows"]})


class Beyond(NamedTuple):
    """How much of a run lies beyond what was measured: shares of its steps, and of the time that they took."""

    steps: float
    time: float

    @classmethod
    def of(cls, out: NDArray[np.bool_], took_ns: Floats) -> Beyond:
        return cls(float(out.mean()) if out.size else 0.0, float(took_ns[out].sum() / max(took_ns.sum(), 1.0)))

    def __str__(self) -> str:
        return f"{shown_share(self.steps)} of the steps and {shown_share(self.time)} of their time"


def recorded_beyond(cost: OperationCost, recording: Recording) -> Beyond | None:
    """Of the steps that a recording kept; None if it kept none."""
    found = recording.table("steps", ["start_ns", "end_ns", *SIZE_COLUMNS])
    if not found.num_rows:
        return None
    out = [
        step_marks(cost, recorded_sizes(found.slice(at, _AT_ONCE))).mark for at in range(0, found.num_rows, _AT_ONCE)
    ]
    took = pc.subtract(found["end_ns"], found["start_ns"]).cast(pa.float64()).to_numpy()
    return Beyond.of(np.concatenate(out) >= Mark.EXTRAPOLATED, took)


def shown_share(share: float) -> str:
    """In percent, never as nothing what is something."""
    return "less than 0.1 %" if 0 < share < 0.001 else f"{100 * share:.1f} %"


def _covered(cost: OperationCost, sizes: StepSizes) -> NDArray[np.bool_]:
    """Whether steps of these amounts were among those that the correction was fitted to."""
    domain = cost.correction.domain
    amounts = {name: np.asarray(values) for name, values in domain_amounts(sizes).items()}
    inside = [(values >= domain[name][0]) & (values <= domain[name][1]) for name, values in amounts.items() if domain]
    return np.logical_and.reduce(inside) if inside else np.zeros(amounts["tokens"].shape, dtype=bool)
