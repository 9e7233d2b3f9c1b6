"""Calibrations of engines: the fitted cost of a step, and the errors of held-out steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import streamlit as st
from numpy.typing import NDArray

from tokentwin.calibration.steps.external_calibration import ExternalCalibration, load_learnt
from tokentwin.calibration.steps.step_cost import Calibration
from tokentwin.calibration.validation.evidence import trust_in_steps
from tokentwin.dashboard import blocks
from tokentwin.dashboard.blocks import data_table, figure, heading, mistake
from tokentwin.dashboard.library import calibrations
from tokentwin.dashboard.sheet import Fact
from tokentwin.dashboard.sheet import show as show_report
from tokentwin.dashboard.shown import literal
from tokentwin.dashboard.trust_page import charts as trust_charts
from tokentwin.dashboard.url import choose
from tokentwin.serving.answers.figures import shown_band, shown_change, shown_percent
from tokentwin.serving.errors import UserError

_STEPS = "steps.parquet"
_COLUMNS = ["regime", "measured_ns", "predicted_ns"]
_PRICES = (
    "Fitted times. The time of a step is the sum over its parts, or that of its kernels times their factors, with what "
    "is added. *CPU* is work between steps."
)
_EVERY = "All measured steps are shown, including those to which the calibration was fitted."


def show(runs: Path) -> None:
    """Draw the calibrations under `runs`, of our own engine and of others."""
    paths = calibrations(runs)
    if not paths:
        st.info(f"There is no calibration in `{runs.resolve().name}` yet.", icon=":material/tune:")
        st.markdown(
            "These commands measure and calibrate our engine in a minute or two. The second runs the complete demo:"
        )
        blocks.code("tokentwin calibrate --out runs/calibration\ntokentwin demo")
        return
    name = choose("Calibration", list(paths), "calibration", lasting=False)
    try:
        learnt = load_learnt(paths[name])
        if learnt is None:
            _own(Calibration.load(paths[name]), paths[name])
        elif isinstance(learnt, ExternalCalibration):
            _other(learnt)
        else:
            show_report(blocks, learnt.report())
    except UserError as error:
        mistake(error, runs)


def _own(calibration: Calibration, directory: Path) -> None:
    low, high = calibration.interval
    st.caption(
        f"calibration {calibration.id} · {calibration.fitted_steps:,} steps fitted · {calibration.created} · "
        f"90 % of runs deviate by {shown_band(100 * (low - 1), 100 * (high - 1))} % from the predicted time"
    )
    medians = [errors.median_error_pct for errors in calibration.residuals.values()]
    held_out = sum(errors.steps for errors in calibration.residuals.values())
    heading("Error on held-out steps", trust_in_steps(held_out, medians, "and not used for the fit"), marked=True)
    blocks.facts(
        Fact(
            f"{name}, median error",
            shown_percent(errors.median_error_pct),
            f"p95 {shown_percent(errors.p95_error_pct)}, bias {shown_change(errors.bias_pct)}, {errors.steps:,} steps",
        )
        for name, errors in calibration.residuals.items()
    )
    if (directory / _STEPS).is_file():
        regime, measured, predicted = _steps(directory / _STEPS)
        rated = trust_in_steps(len(measured), medians, "including those of the fit")
        plot = trust_charts.residuals(regime, measured, predicted)
        plot.update_traces(name="a step", selector={"name": "a held-out step"})
        figure(plot, "residuals", "Step time, predicted against measured", rated, _EVERY)
    _prices(calibration)
    _domain(calibration)


def _prices(calibration: Calibration) -> None:
    st.header("What a step costs", anchor=False, help=_PRICES)
    surfaces = calibration.surfaces
    if surfaces is not None:
        _correction(surfaces.correction.factors, surfaces.added_ns)
        st.caption(
            f"Steps beyond the CUDA graphs take {shown_percent(100 * surfaces.eager)} longer outside of attention."
        )
    prices = [
        {"part": "CPU" if part == "cpu" else part, "of": name, "for": meaning, "time (µs)": table[name] / 1e6}
        for part, meanings, table in calibration.priced
        for name, meaning in meanings.items()
    ]
    data_table(prices, {"time (µs)": "%.4g"}, height="content")
    st.caption(f"Launches without CUDA graphs: {literal(str(calibration.launches))}")
    if calibration.chosen:
        st.caption(literal(calibration.chosen[:1].upper() + calibration.chosen[1:]))


def _steps(path: Path) -> tuple[NDArray[Any], ...]:
    """Return the regime, the measured and the predicted time of every step that was kept."""
    try:
        table = pq.read_table(path, columns=_COLUMNS)
    except (pa.ArrowException, OSError) as error:
        raise UserError("calibration", f"{path.parent.name}/{path.name}", f"is damaged: {error}") from None
    return tuple(np.asarray(table[name]) for name in _COLUMNS)


def _domain(calibration: Calibration) -> None:
    with st.expander("Measured ranges (the time of a step outside them is extrapolated)"):
        rows = [
            {"regime": regime, "of": name, "from": low, "to": high}
            for regime, ranges in calibration.domain.items()
            for name, (low, high) in ranges.items()
        ]
        data_table(rows)
    if calibration.hardware:
        with st.expander("Where this was measured"):
            st.table({name: str(value) for name, value in calibration.hardware.items()})


def _correction(factors: Mapping[str, float], added_ns: Mapping[str, float]) -> None:
    """Draw the factors on kernel times, and the times that are added to them."""
    rows = [{"of": name, "factor": factor, "added (µs)": None} for name, factor in factors.items()]
    data_table([*rows, *({"of": name, "added (µs)": ns / 1e3} for name, ns in added_ns.items())])


def _other(calibration: ExternalCalibration) -> None:
    st.caption(f"calibration {calibration.id} · {calibration.gpu} · from {calibration.source} · {calibration.interval}")
    factors, errors = st.columns(2, gap="large")
    with factors:
        st.header("Correction of predicted kernel times", anchor=False)
        _correction(calibration.correction.factors, calibration.correction.added_ns)
    with errors:
        st.header("Error on held-out steps", anchor=False)
        if calibration.residuals:
            data_table([{"regime": name, **residuals} for name, residuals in calibration.residuals.items()])
        else:
            st.caption("No step was held out.")
