"""Figures of the Trust page: the distance of the simulator from the real engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from tokentwin.calibration.validation.report import RunRow
from tokentwin.dashboard.cdf_panels import Line, cdf_panels
from tokentwin.dashboard.palette import (
    NEUTRAL,
    REAL,
    SIMULATED,
    band,
    bars,
    dots,
    empty,
    finish,
    legend_once,
    line,
    log_axis,
    tint,
    whiskers,
)
from tokentwin.dashboard.series import thin
from tokentwin.serving.answers.figures import shown_band, shown_number, shown_percent
from tokentwin.serving.metrics import label_of
from tokentwin.traces.tables import Floats, ecdf

REGIMES = ("prefill", "decode", "mixed")
_POINTS = 1500


def cdfs(
    real: Sequence[Mapping[str, NDArray[Any]]],
    simulated: Mapping[str, NDArray[Any]] | None,
    metrics: Sequence[str],
    bounds: Sequence[tuple[str, float]] = (),
) -> go.Figure:
    """Return a panel for the distribution of each metric, with a line for every real run and one for the simulation.

    `real` and `simulated` map a metric's name to the values of all requests, NaN for a request without a value;
    `bounds` are those of SLOs (metric, ms).
    """

    def line(values: Mapping[str, NDArray[Any]], *how: Any) -> Line:
        return Line({metric: ecdf(values.get(metric, np.empty(0))) for metric in metrics}, *how)

    repeats = f"real, {len(real)} repeats" if len(real) > 1 else "real"
    lines = [line(run, repeats, REAL, 1.6, 0.75, "dash") for run in real]
    if simulated is not None:
        lines.append(line(simulated, "simulated", SIMULATED, 2.4))
    return cdf_panels(lines, metrics, 380, bounds)


def errors(rows: Sequence[RunRow]) -> go.Figure:
    """Return the simulator's error on each statistic as a bar, over the band within which real repeats differ.

    A whisker is the simulated 90 % band: if it reaches the zero line, it contains the real number.
    """
    shown = [row for row in rows if row.error_pct is not None]
    if not shown:
        return empty("The report compares no run metrics", 340)
    panels = _panels(shown)
    figure = make_subplots(
        cols=len(panels),
        shared_yaxes=True,
        horizontal_spacing=0.03,
        column_widths=[len(entries) + 0.6 for entries in panels.values()],
    )
    floors = []  # added together, because adding them one by one takes Plotly a second
    for at, (panel, entries) in enumerate(panels.items(), start=1):
        for x, row in enumerate(entries.values()):
            if row.floor_pct is not None:
                floors.append(_floor(x, abs(row.floor_pct)) | {"xref": f"x{at}", "yref": f"y{at}"})
        _error_bars(figure, list(entries.values()), row=1, col=at)
        figure.update_xaxes(
            title_text=label_of(panel),
            tickvals=list(range(len(entries))),
            ticktext=list(entries),
            range=[-0.6, len(entries) - 0.4],
            showgrid=False,
            row=1,
            col=at,
        )
    figure.update_layout(shapes=floors)
    legend_once(figure)
    if floors:
        floor, in_legend = tint(REAL, 0.45), {"symbol": "square"}
        dots(figure, [None], [None], "differences of real runs (noise floor)", floor, None, 12, in_legend)
    if any(row.low is not None for row in shown):
        whisker = {"symbol": "line-ns", "line": {"width": 1.5, "color": NEUTRAL}}
        dots(figure, [None], [None], "90 % band", NEUTRAL, None, 12, whisker)
    reach = max(abs(end) for row in shown for end in (row.error_pct or 0, row.floor_pct or 0, *_ends_pct(row)))
    figure.update_yaxes(range=[-1.25 * reach - 0.5, 1.25 * reach + 0.5], zeroline=True, zerolinecolor=NEUTRAL)
    figure.update_yaxes(title_text="error (%)", row=1, col=1)
    return finish(figure, 340)


def _panels(rows: Sequence[RunRow]) -> dict[str, dict[str, RunRow]]:
    """Return the rows by panel and label: a metric's statistics, and in one panel all metrics with one row."""
    counts = Counter(row.metric for row in rows)
    panels: dict[str, dict[str, RunRow]] = {}
    for row in rows:
        alone = counts[row.metric] == 1
        label = row.metric.removesuffix("_throughput") if alone else row.stat
        panels.setdefault("throughput" if alone else row.metric, {})[label] = row
    return panels


def _floor(x: int, floor_pct: float) -> dict[str, Any]:
    """Return the band behind bar number `x` within which real repeats differ."""
    return {
        "type": "rect",
        "x0": x - 0.44,
        "x1": x + 0.44,
        "y0": -floor_pct,
        "y1": floor_pct,
        "line": {"width": 0},
        "fillcolor": tint(REAL, 0.28),
        "layer": "below",
    }


def _error_bars(figure: go.Figure, rows: Sequence[RunRow], **where: int) -> None:
    labels = [
        (
            label_of(row.metric),
            row.stat,
            shown_number(row.real, 4),
            shown_number(row.simulated, 4),
            "unknown" if row.floor_pct is None else shown_percent(abs(row.floor_pct)),
            "" if row.low is None else f"<br>90 % band {shown_band(row.low, row.high, 4)}",
        )
        for row in rows
    ]
    hover = (
        "<b>%{customdata[0]} %{customdata[1]}</b>: %{y:+.1f} %<br>real %{customdata[2]}, simulated %{customdata[3]}"
        "<br>real repeats differ by %{customdata[4]}%{customdata[5]}<extra></extra>"
    )
    look: dict[str, Any] = {"width": 0.42, "cliponaxis": False, "error_y": _whiskers(rows), "customdata": labels}
    look |= {"textposition": "outside" if all(row.low is None for row in rows) else "none"}
    text = [f"{row.error_pct:+.1f}" for row in rows]
    x, y, name = list(range(len(rows))), [row.error_pct for row in rows], "error of the simulation"
    bars(figure, x, y, name, SIMULATED, hover, text=text, **look, **where)


def residuals(regime: NDArray[Any], measured_ns: NDArray[Any], predicted_ns: NDArray[Any]) -> go.Figure:
    """Return each held-out step's error against its measured time, a panel per regime, with median and p5 to p95."""
    regime = np.asarray(regime)
    measured, predicted = np.asarray(measured_ns, dtype=np.float64), np.asarray(predicted_ns, dtype=np.float64)
    known = np.isfinite(measured) & np.isfinite(predicted) & (measured > 0)
    regime, measured, predicted = regime[known], measured[known], predicted[known]
    names = [name for name in REGIMES if (regime == name).any()]
    names += sorted(set(regime.tolist()) - set(names))
    if not names:
        return empty("The report has no held-out steps", 340)
    figure = make_subplots(cols=len(names), shared_yaxes=True, horizontal_spacing=0.035)
    error = 100.0 * (predicted - measured) / measured
    for at, name in enumerate(names, start=1):
        mine = np.flatnonzero(regime == name)
        times_ms = measured[mine] / 1e6
        _residual_panel(figure, times_ms, error[mine], at)
        low, high = float(times_ms.min()), float(times_ms.max())
        axis = log_axis(low, high) if high > 30 * low else {"range": [0, 1.03 * min(high, 1.3 * _p99(times_ms))]}
        figure.update_xaxes(**axis, title_text=f"{name}: measured step time (ms)", row=1, col=at)
    legend_once(figure)
    bound = _p99(np.abs(error)) * 1.3 + 1
    figure.update_yaxes(range=[-bound, bound], zeroline=True, zerolinecolor=NEUTRAL)
    figure.update_yaxes(title_text="predicted against measured (%)", row=1, col=1)
    return finish(figure, 340)


def _residual_panel(figure: go.Figure, times_ms: Floats, error_pct: Floats, at: int) -> None:
    """Draw the dots of one regime, their median, and p5 to p95."""
    shown = thin(len(times_ms), _POINTS)
    low, middle, high = np.percentile(error_pct, [5, 50, 95], method="inverted_cdf")
    ends = [float(times_ms.min()), float(times_ms.max())]
    hover = "measured %{x:,.4~r} ms<br>predicted %{y:+.1f} % off<extra></extra>"
    where: dict[str, Any] = {"row": 1, "col": at}
    dots(figure, times_ms[shown], error_pct[shown], "a held-out step", SIMULATED, hover, 5, {"opacity": 0.4}, **where)
    line(figure, ends, [middle, middle], "median", SIMULATED, "median %{y:+.1f} %<extra></extra>", 2.2, **where)
    band(figure, ends, [low, low], [high, high], "p5 to p95", SIMULATED, **where)


def _p99(values: Floats) -> float:
    return float(np.percentile(values, 99, method="inverted_cdf"))


def _ends_pct(row: RunRow) -> tuple[float, ...]:
    """Return the ends of the band in percent of the real number; empty without a band."""
    if row.low is None or row.high is None or not row.real:
        return ()
    return tuple(100 * (end - row.real) / row.real for end in (row.low, row.high))


def _whiskers(rows: Sequence[RunRow]) -> dict[str, Any] | None:
    ends = [_ends_pct(row) or (row.error_pct or 0.0,) * 2 for row in rows]
    if not any(_ends_pct(row) for row in rows):
        return None
    lows, highs = zip(*ends, strict=True)
    return whiskers([row.error_pct or 0.0 for row in rows], lows, highs, color=NEUTRAL, thickness=1.5, width=5)
