"""Where the step time of a run goes: as the engine timed it, else by the cost model that timed its steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import streamlit as st

from calibration.decision_replay import recorded_deployment
from calibration.explanation import ExplainedOperation
from calibration.operation_cost import OperationCost
from calibration.run_explanation import (
    MEASURED_COLUMNS,
    MODEL,
    PREDICTED_COLUMNS,
    PartTimes,
    explain_run,
    measured_parts,
)
from calibration.standing import VALIDATED, Standing, of_operation, together
from dashboard.badge import BARE, figure
from dashboard.library import stamp
from dashboard.loading import open_run, run_colour
from dashboard.number_columns import number_columns
from dashboard.step_charts import roofline
from dashboard.step_time_charts import part_times
from serving.gpu_spec import GpuSpec
from serving.kv_capacity import weights_dtype
from tokentwin.repricing import Source, repriced, source_of
from traces.recording import Recording

_ROOFLINE = (
    "Every kind of kernel in every kind of step, by its FLOPs for each byte and by what it reaches of them a second; "
    "the larger, the more time it takes. Left of the knee memory is the bound, right of it the tensor cores. "
    "FLOPs and bytes are the least that the operation takes."
)


class _Found(NamedTuple):
    """Parts by regime, how they are known and how well; operations, GPU and weights' dtype if a cost model tells."""

    parts_ns: PartTimes
    operations: list[ExplainedOperation]
    gpu: GpuSpec | None
    weights: str
    how: str
    standing: Standing


def step_time(recording: Recording, calibrations: Sequence[Path]) -> None:
    """The parts by regime, and the operations under their roofline; or a line that says why neither can be told."""
    found = _found(str(recording.path), stamp(recording.path), tuple(map(str, calibrations)))
    if isinstance(found, str):
        st.info(found, icon=":material/info:")
        return
    st.caption(found.how)
    bars = part_times(found.parts_ns, run_colour(recording))
    if found.gpu is None:
        figure(bars, "part_times", "By part", found.standing, menu=BARE)
        st.caption("A recording does not hold the FLOPs and bytes of what was timed, so that there is no roofline.")
        return
    left, right = st.columns(2, gap="medium")
    with left:
        figure(bars, "part_times", "By part", found.standing, menu=BARE)
    with right:
        roofs = roofline(found.operations, found.gpu, found.weights)
        figure(roofs, "run_roofline", "What bounds it", found.standing, _ROOFLINE)
    with st.expander("Every operation"):
        _table(found.operations)


@st.cache_resource(max_entries=16, show_spinner="Explaining its steps")
def _found(directory: str, stamp: int, calibrations: Sequence[str]) -> _Found | str:
    recording, _ = open_run(Path(directory))
    if not recording.table("steps", ["step"]).num_rows:
        return "The recording holds no steps (--summary-only)."
    measured = measured_parts(recording.table("steps", list(MEASURED_COLUMNS)))
    if measured is not None:
        coarse = any(MODEL in parts for parts in measured.values())
        more = "; record the run with `--time-operations` to see it by operation" if coarse else ""
        how = f"As the engine timed it on its device{more}."
        return _Found(measured, [], None, "", how, Standing(VALIDATED, "the engine timed it on its device"))
    source = source_of(recording.run, map(Path, calibrations))
    if source is None:
        return _unknown(recording)
    return _explained(recording, source)


def _explained(recording: Recording, source: Source) -> _Found | str:
    deployment = recorded_deployment(recording)
    fleet = deployment.fleet
    if fleet is not None and any(p.deployment or p.gpu or p.calibration or p.speed != 1 for p in fleet.pools):
        return "The pools of this fleet differ, and steps do not say which pool they are of."
    cost = repriced(source, deployment).cost
    if not isinstance(cost, OperationCost):
        return (
            "The calibration of our own engine that timed it has prices for steps, not for operations. A run timed by "
            "the kernel tables of a GPU, or a real one, tells them."
        )
    found = explain_run(cost, recording.table("steps", list(PREDICTED_COLUMNS)))
    gpu = cost.kernels.gpu
    return _Found(
        found.parts_ns,
        found.operations,
        gpu,
        weights_dtype(cost.model, cost.deployment),
        f"By the kernel tables of {gpu.name}, from {found.steps:,} steps spread over the run.",
        together(map(of_operation, found.operations), "kinds of kernel in its steps"),
    )


def _unknown(recording: Recording) -> str:
    if recording.run["clock"] != "virtual":
        return "The engine did not time what is inside its steps."
    return (
        f"The calibration that timed it ({recording.run['calibration'] or 'it names none'}) is not among the bundled "
        "ones and does not lie under the directory of runs."
    )


def _table(operations: Sequence[ExplainedOperation]) -> None:
    total = sum(o.ns for o in operations)
    rows = sorted(operations, key=lambda o: -o.ns)
    st.dataframe(
        pd.DataFrame(
            {
                "operation": [o.name for o in rows],
                "standing": [o.mark.name.lower() for o in rows],
                "of kernel time (%)": [100 * o.ns / total for o in rows],
                "FLOP/byte": [o.flops / o.bytes for o in rows],
                "of roofline (%)": [100 * o.utilisation for o in rows],
                "bound by": [o.bound for o in rows],
                "known to (± %)": [100 * o.sigma for o in rows],
            }
        ),
        hide_index=True,
        column_config=number_columns(
            dict.fromkeys(("of kernel time (%)", "FLOP/byte", "of roofline (%)", "known to (± %)"), "%.1f")
        ),
    )
