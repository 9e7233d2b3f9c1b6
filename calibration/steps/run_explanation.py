"""Where the step time of a whole run goes: by part, by operation, and in which kind of step.

Measured, where an engine timed its operations. Otherwise from a sample of steps, evenly spaced, of each regime: a cost
model of operations says what their time is made of, and the regime's recorded time is shared out accordingly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from calibration.kernels.times import Coverage, floor_ns
from calibration.operations import Collective, Operation, StepSizes, step_operations
from calibration.steps.coverage import NEGLIGIBLE
from calibration.steps.explanation import ExplainedOperation
from calibration.steps.features import REGIMES, recorded_sizes
from calibration.steps.operation_cost import OperationCost
from serving.deployments.gpu_spec import GpuSpec
from serving.step_plan import AGGREGATES

SAMPLE = 600  # steps of a regime: shares of a part are then known to a percent or two
PREDICTED_COLUMNS = ("start_ns", "end_ns", *AGGREGATES)
MEASURED_COLUMNS = ("start_ns", "end_ns", "prefill_rows", "decode_rows", "forward_ns", "sample_ns", "op_ns")
SAMPLING, REST_OF_MODEL, MODEL = "sampling", "rest of the model", "model"

Regime = str
PartTimes = Mapping[Regime, Mapping[str, float]]


@dataclass(frozen=True)
class RunExplanation:
    """The step time of a run, explained.

    parts_ns    nanoseconds by regime and part; all together the recorded time of the steps
    operations  kernels by regime, of all steps together, as in `explanation`
    steps       how many steps stand behind the shares
    """

    parts_ns: PartTimes
    operations: list[ExplainedOperation]
    steps: int

    @property
    def telling(self) -> list[ExplainedOperation]:
        """Those that are not known too well, or too short, to change how far to trust the whole; as of one step."""
        whole = sum(sum(parts.values()) for parts in self.parts_ns.values())
        return [o for o in self.operations if o.sigma * o.ns >= NEGLIGIBLE * whole] or self.operations


def explain_run(cost: OperationCost, steps: pa.Table) -> RunExplanation:
    """By a cost model, from the columns `PREDICTED_COLUMNS` of the dataset `steps`.

    How uneven decode rows are is not recorded: they are taken for equal, so that there is no part `imbalance`.
    """
    took = _took(steps)
    regime = _regime(steps)
    parts_ns: dict[Regime, dict[str, float]] = {}
    kernels: dict[str, _Sum] = {}
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
        _add_kernels(kernels, cost, sizes, name, recorded / max(float(took[sampled].sum()), 1.0))
    return RunExplanation(parts_ns, [sum_.explained() for sum_ in kernels.values()], count)


def measured_parts(steps: pa.Table) -> PartTimes | None:
    """As the engine timed them, from `MEASURED_COLUMNS`; None for steps that nobody timed within.

    By operation where steps were timed so; else the model and sampling.
    """
    forward = _numbers(steps, "forward_ns")
    timed = np.isfinite(forward)
    if not timed.any():
        return None
    regime, sample = _regime(steps), np.nan_to_num(_numbers(steps, "sample_ns"))
    found: dict[Regime, dict[str, float]] = {}
    for at, name in enumerate(REGIMES):
        members = timed & (regime == at)
        if not members.any():
            continue
        operations = _operation_totals(steps["op_ns"].filter(pa.array(members)))
        rest = float(forward[members].sum()) - sum(operations.values())
        found[name] = {
            **operations,
            REST_OF_MODEL if operations else MODEL: max(rest, 0.0),
            SAMPLING: float(sample[members].sum()),
        }
    return found


def _operation_totals(column: pa.ChunkedArray) -> dict[str, float]:
    totals: dict[str, float] = {}
    for chunk in column.drop_null().chunks:
        flat = pa.table({"name": chunk.keys, "ns": chunk.items})
        for row in flat.group_by("name").aggregate([("ns", "sum")]).to_pylist():
            totals[row["name"]] = totals.get(row["name"], 0.0) + row["ns_sum"]
    return dict(sorted(totals.items()))


@dataclass
class _Sum:
    """All occurrences of one operation in the steps of a regime, from those in the sampled ones."""

    name: str
    operation: Operation
    gpu: GpuSpec
    count: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    ns: float = 0.0
    floor_ns: float = 0.0
    sigma_ns: float = 0.0
    coverage: int = 0

    def explained(self) -> ExplainedOperation:
        compute = self.flops / self.gpu.flop_per_s(getattr(self.operation, "dtype", "bfloat16")) * 1e9
        bound = "compute" if compute > 1e9 * self.bytes / self.gpu.memory_bytes_per_s else "memory"
        return ExplainedOperation(
            name=self.name,
            count=round(self.count),
            flops=self.flops,
            bytes=self.bytes,
            ns=self.ns,
            utilisation=self.floor_ns / self.ns,
            bound="link" if isinstance(self.operation, Collective) else bound,
            sigma=self.sigma_ns / self.ns,
            coverage=Coverage(self.coverage),
        )


def _add_kernels(sums: dict[str, _Sum], cost: OperationCost, sizes: StepSizes, regime: Regime, weight: float) -> None:
    gpu = cost.kernels.gpu
    for operation in step_operations(cost.model, cost.deployment, sizes):
        there = np.broadcast_to(np.asarray(operation.size) > 0, np.shape(sizes.decode_rows))
        if not there.any():
            continue
        estimate = cost.kernels.time(operation)
        name = f"{operation.name}, {regime}"
        entry = sums.setdefault(name, _Sum(name, operation, gpu))
        each = weight * operation.count

        def total(amount: Any, there: NDArray[np.bool_] = there, each: float = each) -> float:
            return each * float(np.sum(np.where(there, amount, 0.0)))

        entry.count += total(1.0)
        entry.flops += total(operation.flops)
        entry.bytes += total(operation.bytes)
        entry.ns += total(estimate.ns)
        entry.floor_ns += total(floor_ns(gpu, operation))
        entry.sigma_ns += total(np.asarray(estimate.sigma) * estimate.ns)
        entry.coverage = max(entry.coverage, int(np.max(np.where(there, estimate.coverage, 0))))


def _regime(steps: pa.Table) -> NDArray[np.int64]:
    prompts, decodes = _numbers(steps, "prefill_rows") > 0, _numbers(steps, "decode_rows") > 0
    index = {name: at for at, name in enumerate(REGIMES)}
    return np.where(prompts, np.where(decodes, index["mixed"], index["prefill"]), index["decode"])


def _took(steps: pa.Table) -> NDArray[np.float64]:
    return _numbers(steps, "end_ns") - _numbers(steps, "start_ns")


def _numbers(steps: pa.Table, name: str) -> NDArray[np.float64]:
    values: NDArray[np.float64] = pc.cast(steps[name], pa.float64(), safe=False).to_numpy()
    return values
