"""Drawings of a run's step time: by part and regime, and every operation under its roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import streamlit as st

from tokentwin.dashboard import blocks
from tokentwin.dashboard.loading import BY_FILES
from tokentwin.dashboard.palette import run_colour
from tokentwin.dashboard.run_page.explained_steps import ExplainedSteps, explained_steps
from tokentwin.dashboard.run_page.step_time_charts import part_times
from tokentwin.dashboard.sheet import Sheet
from tokentwin.dashboard.step_page.charts import roofline
from tokentwin.dashboard.step_page.operation_table import operation_table
from tokentwin.traces.recording import Recording

_ROOFLINE = (
    "Each point is one operation in decode, prefill or mixed steps, at its FLOPs per byte and its FLOP/s. Larger "
    "points take more time in total. Left of the knee the limit is memory bandwidth; right of the knee it is the "
    "tensor cores. FLOPs and bytes are the minimum that the operation needs."
)


def step_time(recording: Recording, calibrations: Sequence[Path]) -> None:
    """Draw the parts by regime, and the operations under their roofline; or one line that says why they are unknown."""
    steps = _explained(recording, calibrations)
    if isinstance(steps, str):
        st.info(steps, icon=":material/info:")
    else:
        show_step_time(blocks, steps, recording.run)


def show_step_time(to: Sheet, steps: ExplainedSteps, run: Mapping[str, Any]) -> None:
    """Show the step time of a run; `run` is its row of `runs`."""
    to.text(steps.how, soft=True)
    bars = part_times(steps.parts_ns, run_colour(run), run["duration_ns"])
    left, right = to.beside(2)
    with left:
        to.figure(bars, "part_times", "By part", steps.trust)
    with right:
        if steps.gpu is None:
            to.text("There is no roofline, because the recording has no FLOPs and bytes of operations.", True)
            return
        roofs = roofline(steps.operations, steps.gpu, steps.weights)
        to.figure(roofs, "run_roofline", "What bounds it", steps.trust, _ROOFLINE)
    with to.fold("Every operation"):
        total = sum(o.ns for o in steps.operations)
        rows = sorted(steps.operations, key=lambda o: -o.ns)
        shares = {"of kernel time (%)": [100 * o.ns / total for o in rows]}
        operation_table(to, rows, **shares, **{"FLOP/byte": [o.flops / o.bytes for o in rows]})


_explained = st.cache_resource(max_entries=16, show_spinner="Explaining its steps", hash_funcs=BY_FILES)(
    explained_steps
)
