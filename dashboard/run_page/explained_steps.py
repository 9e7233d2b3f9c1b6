"""The parts of a run's step time, as the engine timed them or else as the cost model predicts them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tokentwin.calibration.steps.explanation import ExplainedOperation
from tokentwin.calibration.steps.observed import pure
from tokentwin.calibration.steps.operation_cost import OperationCost
from tokentwin.calibration.steps.run_explanation import (
    MEASURED_COLUMNS,
    MODEL,
    PREDICTED_COLUMNS,
    PartTimes,
    explain_run,
    measured_parts,
)
from tokentwin.calibration.trust import MEASURED, Trust, weakest
from tokentwin.calibration.validation.decision_replay import recorded_deployment
from tokentwin.planning.repricing import Source, repriced, source_of
from tokentwin.serving.deployments.gpu_spec import GpuSpec
from tokentwin.serving.deployments.weight_types import weights_dtype
from tokentwin.traces.recording import Recording


class ExplainedSteps(NamedTuple):
    """Parts by regime and the trust in them; if a cost model predicts them, also operations, GPU and weights' dtype."""

    parts_ns: PartTimes
    operations: list[ExplainedOperation]
    gpu: GpuSpec | None
    weights: str
    how: str
    trust: Trust


def explained_steps(recording: Recording, calibrations: Iterable[Path]) -> ExplainedSteps | str:
    """Return a recording's step time by part, or one line that says why the parts are unknown.

    The cost model is the one of `calibrations` that timed the run. Raises UserError if it does not fit the deployment.
    """
    if not recording.table("steps", ["step"]).num_rows:
        return "The recording has no steps, because it was made with --summary-only."
    measured = measured_parts(recording.table("steps", list(MEASURED_COLUMNS)))
    if measured is not None:
        coarse = any(MODEL in parts for parts in measured.values())
        more = "; record the run with `--time-operations` to see every operation" if coarse else ""
        how = f"The engine measured the time of these parts on its device{more}."
        return ExplainedSteps(
            measured, [], None, "", how, Trust(MEASURED, "the engine measured the parts on its device")
        )
    source = source_of(recording.run, calibrations)
    return _unknown(recording) if source is None else _predicted(recording, source)


def _predicted(recording: Recording, source: Source) -> ExplainedSteps | str:
    deployment = recorded_deployment(recording)
    fleet = deployment.fleet
    if fleet is not None and any(p.deployment or p.gpu or p.calibration or p.speed != 1 for p in fleet.pools):
        return "The pools of this fleet differ, and the recording does not state to which pool a step belongs."
    cost = pure(repriced(source, deployment).cost)
    if not isinstance(cost, OperationCost):
        return (
            "The step times of this run come from a calibration of our engine, which predicts steps, not operations. "
            "Real runs, and runs simulated with the kernel tables of a GPU, show their operations."
        )
    explained = explain_run(cost, recording.table("steps", list(PREDICTED_COLUMNS)))
    gpu = cost.kernels.gpu
    return ExplainedSteps(
        explained.parts_ns,
        explained.operations,
        gpu,
        weights_dtype(cost.model, cost.deployment),
        f"Predicted from the kernel tables (measured kernel times) of {gpu.name}, for {explained.steps:,} steps spread "
        "over the run.",
        weakest((o.trust for o in explained.telling), "kinds of kernel that matter in its steps"),
    )


def _unknown(recording: Recording) -> str:
    if recording.run["clock"] != "virtual":
        return "The engine did not time the parts of its steps."
    return (
        f"The calibration of this run ({recording.run['calibration'] or 'no id stated'}) is neither bundled nor in "
        "the runs directory."
    )
