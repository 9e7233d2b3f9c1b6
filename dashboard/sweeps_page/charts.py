"""Figures of the Sweeps page: a metric against a parameter, a series for each value of another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from dashboard.log_axis import log_axis
from dashboard.marks import band, line
from dashboard.palette import SIMULATED, empty, finish, policy_colour, symbols
from dashboard.series import thin

# Orange stays the colour of what is real; a sweep is simulated.
SERIES = (SIMULATED, "#18936f", "#8b5cd6", "#c2557f", "#3aa7b8", "#a07a2c", "#5f6b7d", "#7fb24a")
_LINE = 30  # values of x up to which they are joined
_POINTS = 2000
_DECADE_AND_HALF = 30.0
_UNITS = {"ms": "ms", "s": "s", "tokens": "tokens", "blocks": "blocks", "seqs": "requests", "replicas": "replicas"}
_FAILED = "no run shown has this metric"


def metric_over(
    runs: pd.DataFrame,
    x: str,
    y: str,
    by: str | None,
    titles: Mapping[str, str],
    values: Sequence[Any] = (None,),
    log_y: bool = False,
) -> go.Figure:
    """Column `y` over column `x` of `runs`, a series for each of `values` of column `by`.

    Runs that agree in both (other seeds, other parameters) are one point at their median, in a band from lowest to
    highest, with their own 90 % bands where the sweep has them (columns `Y_low` and `Y_high`). A series with many
    different x, such as a Sobol sequence, is one point a run. Hollow points are extrapolated.
    """
    figure = go.Figure()
    known = runs[runs[y].notna() & runs[x].notna()]
    if not len(known):
        return empty(_FAILED, 420)
    policies = by is not None and by.rpartition(".")[2] == "policy"  # each has one colour on every page
    for at, value in enumerate(values):
        mine = known if by is None else known[known[by] == value]
        if len(mine):
            label = titles[y] if by is None else shown(value)
            _series(figure, mine, x, y, label, policy_colour(label) if policies else SERIES[at % len(SERIES)])
    spread = known[x]
    numeric = pd.api.types.is_numeric_dtype(spread) and not pd.api.types.is_bool_dtype(spread)
    wide = numeric and spread.min() > 0 and spread.max() > _DECADE_AND_HALF * spread.min()
    figure.update_xaxes(title_text=titles[x], type="log" if wide else "linear" if numeric else "category")
    figure.update_yaxes(title_text=titles[y], rangemode="tozero")
    if log_y:
        figure.update_yaxes(**_log_y(known, y))
    if not numeric:  # on an axis of numbers it would move the points
        figure.update_layout(scattermode="group", scattergap=0.6)
    figure.update_layout(legend_title={"text": by and f"{by}  ", "side": "left"})
    return finish(figure, 440, legend=by is not None)


def _log_y(runs: pd.DataFrame, y: str) -> dict[str, Any]:
    """Ticks for the metric's values and the ends of their bands, as far as they are above 0."""
    values = runs[[name for name in (y, f"{y}_low", f"{y}_high") if name in runs]].to_numpy(dtype=float)
    above = values[values > 0]
    return log_axis(above.min(), above.max()) if len(above) else {"type": "log"}


def _series(figure: go.Figure, runs: pd.DataFrame, x: str, y: str, label: str, colour: str) -> None:
    def points(x: Any, y: Any, marks: pd.Series, mode: str, hover: str, **more: Any) -> None:
        marker, told = {"color": colour, "size": 7, "symbol": symbols(marks)}, f"{label}: {hover}<extra></extra>"
        line(figure, list(x), list(y), label, colour, told, mode=mode, marker=marker, legendgroup=label, **more)

    if runs[x].nunique() > _LINE:
        kept = runs.iloc[thin(len(runs), _POINTS)]
        points(kept[x], kept[y], kept["standing"], "markers", "%{y:,.4~g}")
        return
    at = runs.groupby(x, observed=True, sort=True)
    lowest, highest = (end if end in runs else y for end in (f"{y}_low", f"{y}_high"))
    median, low, high, count = at[y].median(), at[lowest].min(), at[highest].max(), at[y].count()
    worst = at["standing"].agg(lambda marks: "extrapolated" if "extrapolated" in set(marks) else "")
    ends = np.stack([low, high, count], axis=1)
    hover = "%{y:,.4~g} (%{customdata[0]:,.4~g} to %{customdata[1]:,.4~g}, %{customdata[2]} runs)"
    numeric = pd.api.types.is_numeric_dtype(runs[x])
    if numeric and bool((high > low).any()):
        band(figure, median.index, low, high, "", colour, showlegend=False, legendgroup=label)
    mode = "lines+markers" if numeric else "markers"
    error = {"array": high - median, "arrayminus": median - low, "color": colour, "thickness": 1.2}
    points(median.index, median, worst, mode, hover, customdata=ends, error_y=None if numeric else error)


def parameter_title(name: str) -> str:
    """What a parameter is called on an axis: its name, with the unit that this tells."""
    last = name.rpartition(".")[2]
    if last == "rate" or last.endswith("_rate"):
        return f"{name} (requests/s)"
    unit = _UNITS.get(last.rpartition("_")[2])
    return f"{name} ({unit})" if unit else name


def shown(value: Any) -> str:
    """A parameter's value for people, and for the URL, where a comma would be the end of it."""
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return "none"
    return f"{value:.10g}" if isinstance(value, float) else str(value).replace(",", " ")
