"""A run's metrics for people and for scripts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from tokentwin.outcome import Outcome, status_word

if TYPE_CHECKING:
    from serving.metrics import Metric
    from traces.recording import Recording
    from traces.run_metrics import RunMetrics

_STATS = ("mean", "p50", "p90", "p95", "p99", "max")
_DROPPED_FIRST = ("max", "p90", "p95")
_NARROWEST_LABEL = 18


def print_metrics(
    metrics: RunMetrics, style: str, bands: Mapping[str, Mapping[str, tuple[float, float]]] | None = None, **more: Any
) -> None:
    """Latency percentiles and the run's scalars; `style` is `table` or `json`, `more` goes into the JSON.

    `bands` are the ends of 90 % bands by metric and statistic, shown under the numbers. Where a screen is too narrow,
    statistics are left out; no number is cut.
    """
    from serving.metrics import metric

    distributions = {name: d.as_dict() for name, d in metrics.distributions().items() if d.count}
    scalars = metrics.scalars()
    if style == "json":
        if bands is not None:
            more["bands"] = bands
        click.echo(json.dumps({"distributions": distributions, **scalars, "requests": metrics.statuses(), **more}))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    rows: list[tuple[str, str, dict[str, str]]] = []
    for name, numbers in distributions.items():
        about = metric(name)
        unit = about.read_unit
        label = name if not unit or name.endswith(f"_{unit}") else f"{name}, {unit}"
        rows.append((label, "", {stat: _shown(about.read(numbers[stat])) for stat in _STATS}))
        ends = (bands or {}).get(name, {})
        if any(high for _, high in ends.values()):
            for end, which in enumerate(("from", "to")):
                rows.append((f"  {which}", "dim", {stat: _shown(about.read(pair[end])) for stat, pair in ends.items()}))
    console = Console()
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    table.add_column("metric", overflow="fold")
    stats = _fitting([cells for _, _, cells in rows], console.width)
    for stat in stats:
        table.add_column(stat, no_wrap=True, justify="right")
    for label, style_of_row, cells in rows:
        table.add_row(label, *(cells.get(stat, "") for stat in stats), style=style_of_row)
    if distributions:
        console.print(table)
    summary = Table("metric", "unit", "value", *(["90 % band"] if bands else []))
    for name, value in scalars.items():
        if value is not None:
            about = metric(name.removesuffix("_peak"))
            shown = [_range(about, (bands or {}).get(name, {}).get("value"))] if bands else []
            summary.add_row(name, about.read_unit, _shown(about.read(value)), *shown)
    console.print(summary)
    if bands:
        console.print("[dim]from, to: 90 % band, by how far off the step times of a whole run may be[/]")
    outcome = Outcome.of(metrics)
    console.print(f"requests: {outcome.text}")
    if outcome.shortfall:
        console.print(f"[red]{outcome.shortfall}[/]: {outcome.latencies_of}")


def print_reasons(recording: Recording) -> None:
    """How many requests did not finish, by how they ended, and why the first of each did not."""
    import pyarrow.compute as pc

    requests = recording.table("requests", ["status", "reason"])
    told = requests.filter(pc.greater(pc.utf8_length(requests["reason"]), 0))
    by_status = told.group_by("status", use_threads=False).aggregate([("reason", "count"), ("reason", "first")])
    for status, count, first in zip(*(column.to_pylist() for column in by_status.columns), strict=True):
        click.echo(f"{count:,} {status_word(status)}, the first because: {first}")


def print_tiers(metrics: RunMetrics) -> None:
    """Which share of the prompt tokens came from each KV tier, if there were any."""
    if metrics.scalars()["tier_hit_rate"] is not None:
        shares = [f"{rate:.1%} from {tier}" for tier, rate in metrics.tier_hit_rates().items()]
        click.echo(f"of the prompt tokens were loaded: {', '.join(shares) or 'none'}")


def _fitting(rows: list[dict[str, str]], width: int) -> list[str]:
    """The statistics whose columns fit on `width` characters in full, beside a label."""
    widths = {stat: max((len(row.get(stat, "")) for row in rows), default=0) for stat in _STATS}
    left = list(_STATS)
    for stat in _DROPPED_FIRST:
        if _NARROWEST_LABEL + sum(1 + max(len(stat), widths[stat]) for stat in left) < width:
            break
        left.remove(stat)
    return left


def _range(about: Metric, band: tuple[float, float] | None) -> str:
    return "" if band is None else "–".join(_shown(about.read(end)) for end in band)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return "-" if math.isnan(value) else f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return str(value)
