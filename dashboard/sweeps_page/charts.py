"""Figures of the Sweeps page: a metric over a parameter, with a series for each value of another parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pyarrow as pa

from calibration.trust import Trust, noted_trust, weakest
from dashboard.palette import MARKS, SERIES, band, empty, finish, line, log_axis, policy_colour, symbols
from dashboard.series import thin
from planning.exports.sweep import SweepView
from planning.sweep.results import SweepResults
from serving.metrics import METRICS

FIRST = ("slo_attainment", "ttft_ms_p99", "tpot_ms_p99", "e2e_ms_p99", "tok_s_gpu", "usd_per_mtok_out")
SERIES_AT_FIRST = 4
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
    """Return a parameter's value as text without commas, because a comma ends a value in the URL."""
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return "none"
    return f"{value:.10g}" if isinstance(value, float) else str(value).replace(",", " ")


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
    y, x, by, values, log_y = view
    ends = [end for end in (f"{y}_low", f"{y}_high") if end in runs.column_names]
    columns = dict.fromkeys([x, y, *ends, "trust", *([by] if by else [])])
    titles = {**sweep.metrics, x: parameter_title(x)}
    return metric_over(runs.select(list(columns)).to_pandas(), x, y, by, titles, values, log_y)


def trust(runs: pa.Table) -> Trust:
    """Return the trust in runs shown together."""
    noted = zip(runs["trust"].to_pylist(), runs["trust_reason"].to_pylist(), strict=True)
    return weakest((noted_trust(*trust, "the run does not state how far to trust it") for trust in noted), "runs")


def help_of(column: str) -> str | None:
    """Return the meaning of a metric's column, if the registry knows it."""
    known = METRICS.get(column) or METRICS.get(column.rpartition("_")[0])
    return known.help if known else None
