"""Where the step time of a run goes, drawn: by part and regime, and every operation under its roofline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import streamlit as st

from calibration.steps.explanation import ExplainedOperation
from dashboard.badge import BARE, figure
from dashboard.library import stamp
from dashboard.loading import open_run, run_colour
from dashboard.number_columns import number_columns
from dashboard.run_page.explained_steps import ExplainedSteps, explained_steps
from dashboard.run_page.step_time_charts import part_times
from dashboard.step_page.charts import roofline
from traces.recording import Recording

_ROOFLINE = (
    "Every kind of kernel in every kind of step, by its FLOPs for each byte and by what it reaches of them a second; "
    "the larger, the more time it takes. Left of the knee memory is the bound, right of it the tensor cores. "
    "FLOPs and bytes are the least that the operation takes."
)


def step_time(recording: Recording, calibrations: Sequence[Path]) -> None:
    """The parts by regime, and the operations under their roofline; or a line that says why neither can be told."""
    found = _found(str(recording.path), stamp(recording.path), tuple(map(str, calibrations)))
    if isinstance(found, str):
        st.info(found, icon=":material/info:")
        return
    st.caption(found.how)
    bars = part_times(found.parts_ns, run_colour(recording), recording.run["duration_ns"])
    if found.gpu is None:
        figure(bars, "part_times", "By part", found.provenance, menu=BARE)
        st.caption("A recording does not hold the FLOPs and bytes of what was timed, so that there is no roofline.")
        return
    left, right = st.columns(2, gap="medium")
    with left:
        figure(bars, "part_times", "By part", found.provenance, menu=BARE)
    with right:
        roofs = roofline(found.operations, found.gpu, found.weights)
        figure(roofs, "run_roofline", "What bounds it", found.provenance, _ROOFLINE)
    with st.expander("Every operation"):
        _table(found.operations)


@st.cache_resource(max_entries=16, show_spinner="Explaining its steps")
def _found(directory: str, stamp: int, calibrations: Sequence[str]) -> ExplainedSteps | str:
    recording, _ = open_run(Path(directory))
    return explained_steps(recording, map(Path, calibrations))


def _table(operations: Sequence[ExplainedOperation]) -> None:
    total = sum(o.ns for o in operations)
    rows = sorted(operations, key=lambda o: -o.ns)
    st.dataframe(
        pd.DataFrame(
            {
                "operation": [o.name for o in rows],
                "standing": [o.coverage.name.lower() for o in rows],
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
