"""Figures of the Sweeps page: a metric over a parameter, with a series for each value of another parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pyarrow as pa

from tokentwin.calibration.trust import Trust, noted_trust, weakest
from tokentwin.dashboard.palette import (
    MARKS,
    SERIES,
    band,
    dots,
    empty,
    finish,
    line,
    log_axis,
    policy_colour,
    slo_line,
    symbols,
)
from tokentwin.dashboard.series import thin
from tokentwin.planning.exports.sweep import SweepView
from tokentwin.planning.sweep.results import SweepResults
from tokentwin.serving.answers.figures import shown_number
from tokentwin.serving.metrics import METRICS

FIRST = ("slo_attainment", "ttft_ms_p99", "tpot_ms_p99", "e2e_ms_p99", "tok_s_gpu", "usd_per_mtok_out")
SERIES_AT_FIRST = 4
LINE, SCATTER, HEAT_MAP = "line", "scatter", "heat map"
MOST_CELLS = 40  # values of a parameter in a heat map
_LINE = 30  # number of x values up to which points are joined by lines
_POINTS = 2000
_DECADE_AND_HALF = 30.0
_UNITS = {"ms": "ms", "s": "s", "tokens": "tokens", "blocks": "blocks", "seqs": "requests", "replicas": "replicas"}
_FAILED = "none of these runs has this metric"


def metric_over(
    runs: pd.DataFrame,
    x: str,
    y: str,
    by: str | None,
    titles: Mapping[str, str],
    values: Sequence[Any] = (None,),
    log_y: bool = False,
) -> go.Figure:
    """Return column `y` over column `x` of `runs`, with a series for each of `values` of column `by`.

    Runs with equal values of `x` and `by` are one point at their median, in a band from the lowest to the highest. The
    band includes the runs' 90 % bands if the sweep has them (columns `Y_low` and `Y_high`). A series with many
    different values of `x`, such as a Sobol sequence, has one point for each run. Hollow points are extrapolated.
    """
    figure = go.Figure()
    known = runs[runs[y].notna() & runs[x].notna()]
    if not len(known):
        return empty(_FAILED, 420)
    policies = by is not None and by.rpartition(".")[2] == "policy"  # a policy has one colour on every page
    for at, value in enumerate(values):
        mine = known if by is None else known[known[by] == value]
        if len(mine):
            label = titles[y] if by is None else shown(value)
            colour = policy_colour(label) if policies else SERIES[at % len(SERIES)]
            _series(figure, mine, x, y, label, colour, MARKS[at % len(MARKS)])
    spread = known[x]
    numeric = pd.api.types.is_numeric_dtype(spread) and not pd.api.types.is_bool_dtype(spread)
    wide = numeric and spread.min() > 0 and spread.max() > _DECADE_AND_HALF * spread.min()
    kind = "linear" if numeric else "category"
    figure.update_xaxes(title_text=titles[x], type="log" if wide else kind)
    figure.update_yaxes(title_text=titles[y], rangemode="tozero")
    if log_y:
        figure.update_yaxes(**_log_y(known, y))
    if not numeric:  # grouping would move the points on a numeric axis
        figure.update_layout(scattermode="group", scattergap=0.6)
    figure.update_layout(legend_title={"text": by and f"{by}  ", "side": "left"})
    return finish(figure, 440, legend=by is not None)


def each_run(
    runs: pd.DataFrame,
    x: str,
    y: str,
    by: str | None,
    titles: Mapping[str, str],
    values: Sequence[Any] = (None,),
    log_y: bool = False,
) -> go.Figure:
    """Return a point for each run: column `y` against column `x`, coloured by column `by`; hollow if extrapolated."""
    figure = go.Figure()
    known = runs[runs[y].notna() & runs[x].notna()]
    if not len(known):
        return empty(_FAILED, 420)
    policies = by is not None and by.rpartition(".")[2] == "policy"
    for at, value in enumerate(values):
        mine = known if by is None else known[known[by] == value]
        mine = mine.iloc[thin(len(mine), _POINTS)]
        if len(mine):
            label = "runs" if by is None else shown(value)
            colour = policy_colour(label) if policies else SERIES[at % len(SERIES)]
            hover = f"{label}: %{{y:,.4~g}} at %{{x:,.4~g}}<extra></extra>"
            symbol = MARKS[at % len(MARKS)]  # a series differs by more than its colour
            dots(figure, mine[x], mine[y], label, colour, hover, 8, {"symbol": symbols(mine["trust"], symbol)})
    figure.update_xaxes(title_text=titles[x])
    figure.update_yaxes(title_text=titles[y], rangemode="tozero")
    if log_y:
        figure.update_yaxes(**_log_y(known, y))
    figure.update_layout(legend_title={"text": by and f"{by}  ", "side": "left"})
    return finish(figure, 440, legend=by is not None)


def heat_map(runs: pd.DataFrame, x: str, y: str, by: str, titles: Mapping[str, str]) -> go.Figure:
    """Return the median of column `y` for each value of column `x` (columns) and of `by` (rows), as colour and number.

    A cell has the number of its runs on hover, and a star if one of them is extrapolated. Runs may be at most
    `MOST_CELLS` values wide and high.
    """
    known = runs[runs[y].notna() & runs[x].notna() & runs[by].notna()]
    if not len(known):
        return empty(_FAILED, 420)
    cells = known.groupby([by, x], observed=True, sort=True)
    median = cells[y].median().unstack()
    count = cells[y].count().unstack().fillna(0)
    beyond = cells["trust"].agg(lambda levels: "extrapolated" in set(levels)).unstack().fillna(False)
    pairs = (zip(*row, strict=True) for row in zip(median.to_numpy(), beyond.to_numpy(), strict=True))
    text = [["" if np.isnan(value) else shown_number(value) + "*" * bool(star) for value, star in row] for row in pairs]
    figure = go.Figure(
        go.Heatmap(
            x=list(map(shown, median.columns)),
            y=list(map(shown, median.index)),
            z=median.to_numpy(),
            text=text,
            texttemplate="%{text}",
            customdata=count.to_numpy(),
            hovertemplate=f"{x} %{{x}}, {by} %{{y}}: %{{z:,.4~g}}, %{{customdata}} runs<extra></extra>",
            colorscale="Cividis",  # made for readers with colour deficiencies (Nunez et al. 2018)
            colorbar={"title": {"text": titles[y], "side": "right"}, "thickness": 12},
            xgap=1,
            ygap=1,
        )
    )
    figure.update_xaxes(title_text=titles[x], type="category")
    figure.update_yaxes(title_text=titles[by], type="category")
    return finish(figure, 440, legend=False)


def _log_y(runs: pd.DataFrame, y: str) -> dict[str, Any]:
    """Return ticks for the metric's values and the ends of their bands, as far as they are above 0."""
    values = runs[[name for name in (y, f"{y}_low", f"{y}_high") if name in runs]].to_numpy(dtype=float)
    above = values[values > 0]
    return log_axis(above.min(), above.max()) if len(above) else {"type": "log"}


def _series(figure: go.Figure, runs: pd.DataFrame, x: str, y: str, label: str, colour: str, mark: str) -> None:
    def points(x: Any, y: Any, levels: pd.Series, mode: str, hover: str, **more: Any) -> None:
        marker, hover = (
            {"color": colour, "size": 7, "symbol": symbols(levels, mark)},
            f"{label}: {hover}<extra></extra>",
        )
        line(figure, list(x), list(y), label, colour, hover, mode=mode, marker=marker, legendgroup=label, **more)

    if runs[x].nunique() > _LINE:
        kept = runs.iloc[thin(len(runs), _POINTS)]
        points(kept[x], kept[y], kept["trust"], "markers", "%{y:,.4~r}")
        return
    at = runs.groupby(x, observed=True, sort=True)
    lowest, highest = (end if end in runs else y for end in (f"{y}_low", f"{y}_high"))
    median, low, high, count = at[y].median(), at[lowest].min(), at[highest].max(), at[y].count()
    worst = at["trust"].agg(lambda levels: "extrapolated" if "extrapolated" in set(levels) else "")
    ends = np.stack([low, high, count], axis=1)
    hover = "%{y:,.4~r} (%{customdata[0]:,.4~r} to %{customdata[1]:,.4~r}, %{customdata[2]} runs)"
    numeric = pd.api.types.is_numeric_dtype(runs[x])
    if numeric and bool((high > low).any()):
        band(figure, median.index, low, high, "", colour, showlegend=False, legendgroup=label)
    mode = "lines+markers" if numeric else "markers"
    error = {"array": high - median, "arrayminus": median - low, "color": colour, "thickness": 1.2}
    points(median.index, median, worst, mode, hover, customdata=ends, error_y=None if numeric else error)


def parameter_title(name: str) -> str:
    """Return a parameter's title on an axis: its name, with the unit that the name implies."""
    last = name.rpartition(".")[2]
    if last == "rate" or last.endswith("_rate"):
        return f"{name} (requests/s)"
    unit = _UNITS.get(last.rpartition("_")[2])
    return f"{name} ({unit})" if unit else name


def shown(value: Any) -> str:
    """Return a parameter's value as text: without commas, which end a value in the URL, and without a file's folder."""
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return "none"
    if isinstance(value, float):
        return f"{value:.10g}"
    text = str(value).replace(",", " ")
    return text.rpartition("/")[2] if ".py:" in text else text


def opening_view(sweep: SweepResults) -> SweepView:
    """Return the view with which the page opens. The sweep must have a metric."""
    y, x = metrics_in_order(sweep)[0], parameters_in_order(sweep)[0]
    by = next(iter(others_in_order(sweep, x)), None)
    return SweepView(y, x, by, (None,) if by is None else some(sweep.values(by)))


def metrics_in_order(sweep: SweepResults) -> list[str]:
    """Return the metrics, the main metrics first."""
    return sorted(sweep.metrics, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))


def parameters_in_order(sweep: SweepResults) -> list[str]:
    """Return parameters in the order of their use as an axis: numbers with many values first, seeds late."""
    parameters = list(sweep.parameters) or ["run_id"]
    likely = sorted(parameters, key=lambda name: (not numeric(sweep, name), name.endswith("seed")))
    likely.sort(key=lambda name: -len(sweep.values(name)) if numeric(sweep, name) else 0)
    return likely


def others_in_order(sweep: SweepResults, x: str) -> list[str]:
    """Return parameters in the order of their use for colours: all but `x`, names with few values first."""
    others = [name for name in list(sweep.parameters) or ["run_id"] if name != x]
    return sorted(others, key=lambda name: (numeric(sweep, name), len(sweep.values(name))))


def some(values: Sequence[Any], most: int = SERIES_AT_FIRST) -> list[Any]:
    """Return at most `most` of the values, from the first to the last."""
    if len(values) <= most:
        return list(values)
    return [values[round(at * (len(values) - 1) / (most - 1))] for at in range(most)]


def numeric(sweep: SweepResults, name: str) -> bool:
    """Return whether a column holds numbers."""
    kind = sweep.runs.schema.field(name).type
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def drawn(sweep: SweepResults, runs: pa.Table, view: SweepView) -> Any:
    """Return the figure of `runs`, which are some of the sweep's runs."""
    y, x, by, values, log_y, kind = view
    ends = [end for end in (f"{y}_low", f"{y}_high") if end in runs.column_names]
    columns = dict.fromkeys([x, y, *ends, "trust", *([by] if by else [])])
    titles = {**{name: parameter_title(name) for name in (x, by) if name}, **sweep.metrics}
    data = runs.select(list(columns)).to_pandas()
    if kind == HEAT_MAP and by is not None:
        return heat_map(data, x, y, by, titles)
    plot = (each_run if kind == SCATTER else metric_over)(data, x, y, by, titles, values, log_y)
    for axis, name, log in (("x", x, False), ("y", y, log_y)):
        if (bound := _bound_of(sweep, name)) is not None:
            slo_line(plot, bound, "SLO", axis, log)
    return plot


def _bound_of(sweep: SweepResults, column: str) -> float | None:
    """Return the bound in ms that every run's SLO sets on a column's metric; None without one."""
    metric, bounds = column.rpartition("_")[0], sweep.base.get("slo")
    if not isinstance(bounds, Mapping) or any(path.partition(".")[0] == "slo" for path in sweep.paths.values()):
        return None
    bound = bounds.get(metric)
    return float(bound) if isinstance(bound, int | float) else None


def heading(sweep: SweepResults, view: SweepView) -> str:
    """Return the heading of a view's figure."""
    if view.kind == HEAT_MAP:
        return f"{sweep.metrics[view.y]} by {view.x} and {view.by}"
    return f"{sweep.metrics[view.y]} against {sweep.metrics.get(view.x, view.x)}"


def trust(runs: pa.Table) -> Trust:
    """Return the trust in runs shown together."""
    noted = zip(runs["trust"].to_pylist(), runs["trust_reason"].to_pylist(), strict=True)
    return weakest((noted_trust(*trust, "the run does not state how far to trust it") for trust in noted), "runs")


def help_of(column: str) -> str | None:
    """Return the meaning of a metric's column, if the registry knows it."""
    known = METRICS.get(column) or METRICS.get(column.rpartition("_")[0])
    return known.help if known else None
