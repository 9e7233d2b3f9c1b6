"""Where the step time of a run goes, drawn: by part and regime, and every operation under its roofline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import streamlit as st

from dashboard.blocks import BARE, figure
from dashboard.loading import BY_FILES
from dashboard.palette import run_colour
from dashboard.run_page.explained_steps import explained_steps
from dashboard.run_page.step_time_charts import part_times
from dashboard.step_page.charts import roofline
from dashboard.step_page.operation_table import operation_table
from traces.recording import Recording

_ROOFLINE = (
    "Each point is a kind of kernel in a kind of step: its FLOPs per byte, and the FLOP/s that it reaches. Larger "
    "points take more time. Left of the knee memory bandwidth is the limit, right of it the tensor cores. FLOPs and "
    "bytes are the least that the operation needs."
)


def step_time(recording: Recording, calibrations: Sequence[Path]) -> None:
    """The parts by regime, and the operations under their roofline; or a line that says why neither can be told."""
    found = _explained(recording, calibrations)
    if isinstance(found, str):
        st.info(found, icon=":material/info:")
        return
    st.caption(found.how)
    bars = part_times(found.parts_ns, run_colour(recording.run), recording.run["duration_ns"])
    if found.gpu is None:
        figure(bars, "part_times", "By part", found.provenance, menu=BARE)
        st.caption("There is no roofline: the recording does not hold the FLOPs and bytes of the operations.")
        return
    left, right = st.columns(2, gap="medium")
    with left:
        figure(bars, "part_times", "By part", found.provenance, menu=BARE)
    with right:
        roofs = roofline(found.operations, found.gpu, found.weights)
        figure(roofs, "run_roofline", "What bounds it", found.provenance, _ROOFLINE)
    with st.expander("Every operation"):
        total = sum(o.ns for o in found.operations)
        rows = sorted(found.operations, key=lambda o: -o.ns)
        shares = {"of kernel time (%)": [100 * o.ns / total for o in rows]}
        operation_table(rows, **shares, **{"FLOP/byte": [o.flops / o.bytes for o in rows]})


_explained = st.cache_resource(max_entries=16, show_spinner="Explaining its steps", hash_funcs=BY_FILES)(
    explained_steps
)
