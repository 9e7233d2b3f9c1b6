"""A report of a run on a terminal: latency percentiles, other metrics, and how its requests ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from planning.request_endings import RequestEndings
from serving.figures import shown_band
from serving.metrics import Metric, metric
from traces.metrics.run_metrics import RunMetrics

Bands = Mapping[str, Mapping[str, tuple[float, float]]]

_STATS = ("mean", "p50", "p90", "p95", "p99", "max")
_DROPPED_FIRST = ("max", "p90", "p95")
_NARROWEST_LABEL = 18


def run_report(metrics: RunMetrics, bands: Bands | None = None, width: int = 100) -> Iterator[RenderableType]:
    """Yield latency percentiles and the run's scalars.

    `bands` are the ends of 90 % bands by metric and statistic, shown under the numbers. If `width` characters are too
    few, statistics are left out; no number is cut.
    """
    distributions = {name: d.as_dict() for name, d in metrics.distributions().items() if d.count}
    scalars = metrics.scalars()
    rows: list[tuple[str, str, dict[str, str]]] = []
    for name, numbers in distributions.items():
        about = metric(name)
        unit = about.read_unit
        label = name if not unit or name.endswith(f"_{unit}") else f"{name}, {unit}"
        rows.append((label, "", {stat: about.shown(numbers[stat]) for stat in _STATS}))
        ends = (bands or {}).get(name, {})
        if any(high for _, high in ends.values()):
            for end, which in enumerate(("from", "to")):
                rows.append((f"  {which}", "dim", {stat: about.shown(pair[end]) for stat, pair in ends.items()}))
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    table.add_column("metric", overflow="fold")
    stats = _fitting([cells for _, _, cells in rows], width)
    for stat in stats:
        table.add_column(stat, no_wrap=True, justify="right")
    for label, style_of_row, cells in rows:
        table.add_row(label, *(cells.get(stat, "") for stat in stats), style=style_of_row)
    if distributions:
        yield table
    summary = Table("metric", "unit", "value", *(["90 % band"] if bands else []))
    for name, value in scalars.items():
        if value is not None:
            about = metric(name.removesuffix("_peak"))
            shown = [_range(about, (bands or {}).get(name, {}).get("value"))] if bands else []
            summary.add_row(name, about.read_unit, about.shown(value), *shown)
    yield summary
    if bands:
        yield Text("from, to: ends of the 90 % band, which follows from the error of step times", style="dim")
    outcome = RequestEndings.from_metrics(metrics)
    yield Text(f"requests: {outcome.text}")
    if outcome.shortfall:
        yield Text.assemble((outcome.shortfall, "red"), f": {outcome.latencies_of}")


def _fitting(rows: list[dict[str, str]], width: int) -> list[str]:
    """Return the statistics whose columns fit in `width` characters in full, beside a label."""
    widths = {stat: max((len(row.get(stat, "")) for row in rows), default=0) for stat in _STATS}
    left = list(_STATS)
    for stat in _DROPPED_FIRST:
        if _NARROWEST_LABEL + sum(1 + max(len(stat), widths[stat]) for stat in left) < width:
            break
        left.remove(stat)
    return left


def _range(about: Metric, band: tuple[float, float] | None) -> str:
    return "" if band is None else shown_band(*map(about.read, band))
