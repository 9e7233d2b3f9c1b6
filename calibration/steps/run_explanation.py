"""The step time of a whole run: by part, by operation, and by kind of step.

The times are measured if the engine timed its operations. Otherwise a cost model of operations predicts the parts of an
evenly spaced sample of each regime's steps. The recorded time of the regime is then divided in these proportions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokentwin.calibration.operations import StepSizes
from tokentwin.calibration.step_operations import step_operations
from tokentwin.calibration.steps.explanation import ExplainedOperation, explained
from tokentwin.calibration.steps.features import REGIMES, recorded_sizes, regimes
from tokentwin.calibration.steps.operation_cost import OperationCost
from tokentwin.calibration.steps.step_trust import NEGLIGIBLE
from tokentwin.serving.step_plan import AGGREGATES
from tokentwin.traces.tables import numbers

SAMPLE = 600  # maximum number of sampled steps per regime; shares are then accurate to 1 or 2 percentage points
PREDICTED_COLUMNS = ("start_ns", "end_ns", *AGGREGATES)
MEASURED_COLUMNS = ("start_ns", "end_ns", "prefill_rows", "decode_rows", "forward_ns", "sample_ns", "op_ns")
SAMPLING, REST_OF_MODEL, MODEL = "sampling", "rest of the model", "model"

Regime = str
PartTimes = Mapping[Regime, Mapping[str, float]]


@dataclass(frozen=True)
class RunExplanation:
    """The explained step time of a run.

    Attributes:
        parts_ns: nanoseconds by regime and part; their sum is the recorded time of the steps
        operations: kernels by regime, summed over all steps, as in `explanation`
        steps: number of sampled steps
    """

    parts_ns: PartTimes
    operations: list[ExplainedOperation]
    steps: int

    @property
    def telling(self) -> list[ExplainedOperation]:
        """Operations with an error that is not negligible for the whole; all operations if there are none."""
        whole = sum(sum(parts.values()) for parts in self.parts_ns.values())
        return [o for o in self.operations if o.sigma * o.ns >= NEGLIGIBLE * whole] or self.operations


def explain_run(cost: OperationCost, steps: pa.Table) -> RunExplanation:
    """Explain a run by a cost model, from the columns `PREDICTED_COLUMNS` of its table `steps`.

    The spread of decode contexts is not recorded. The contexts are assumed to be equal, so there is no part
    `imbalance`.
    """
    took = numbers(steps, "end_ns") - numbers(steps, "start_ns")
    regime = _regime(steps)
    parts_ns: dict[Regime, dict[str, float]] = {}
    kernels: list[ExplainedOperation] = []
    count = 0
    for at, name in enumerate(REGIMES):
        members = np.flatnonzero(regime == at)
        if not len(members):
            continue
        sampled = members[np.unique(np.linspace(0, len(members) - 1, min(SAMPLE, len(members))).astype(np.int64))]
        count += len(sampled)
        chosen = steps.take(pa.array(sampled))
        sizes = recorded_sizes(chosen)
        predicted = {part: float(ns.sum()) for part, ns in cost.parts(sizes).items()}
        recorded, total = float(took[members].sum()), sum(predicted.values())
        parts_ns[name] = {part: ns * recorded / total for part, ns in predicted.items() if ns > 0}
        kernels += _kernels(cost, sizes, name, recorded / max(float(took[sampled].sum()), 1.0))
    return RunExplanation(parts_ns, kernels, count)


def measured_parts(steps: pa.Table) -> PartTimes | None:
    """Return the times that the engine measured, from `MEASURED_COLUMNS`; None if no step has times of its parts.

    The parts are the operations if these were timed, else the model and sampling.
    """
    forward = numbers(steps, "forward_ns")
    timed = np.isfinite(forward)
    if not timed.any():
        return None
    regime, sample = _regime(steps), np.nan_to_num(numbers(steps, "sample_ns"))
    parts_ns: dict[Regime, dict[str, float]] = {}
    for at, name in enumerate(REGIMES):
        members = timed & (regime == at)
        if not members.any():
            continue
        operations = _operation_totals(steps["op_ns"].filter(pa.array(members)))
        rest = float(forward[members].sum()) - sum(operations.values())
        parts_ns[name] = {
            **operations,
            REST_OF_MODEL if operations else MODEL: max(rest, 0.0),
            SAMPLING: float(sample[members].sum()),
        }
    return parts_ns


def _operation_totals(column: pa.ChunkedArray) -> dict[str, float]:
    times = column.drop_null().combine_chunks()
    totals = pa.table({"name": times.keys, "ns": times.items}).group_by("name").aggregate([("ns", "sum")])
    return {row["name"]: float(row["ns_sum"]) for row in totals.sort_by("name").to_pylist()}


def _kernels(cost: OperationCost, sizes: StepSizes, regime: Regime, weight: float) -> Iterator[ExplainedOperation]:
    """Yield each operation of a regime's sampled steps, with amounts multiplied by `weight`."""
    for operation in step_operations(cost.model, cost.deployment, sizes):
        there = np.broadcast_to(np.asarray(operation.size) > 0, np.shape(sizes.decode_rows))
        if there.any():
            yield explained(cost, operation, f"{operation.name}, {regime}", there, weight)


def _regime(steps: pa.Table) -> NDArray[np.int64]:
    return regimes(StepSizes(prefill_tokens=numbers(steps, "prefill_rows"), decode_rows=numbers(steps, "decode_rows")))
