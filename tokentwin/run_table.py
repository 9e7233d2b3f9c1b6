"""A run's metrics for people and for scripts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from traces.recording import Recording
    from traces.run_metrics import RunMetrics

_STATS = ("mean", "p50", "p90", "p95", "p99", "max")


def print_metrics(
    metrics: RunMetrics, style: str, bands: Mapping[str, Mapping[str, tuple[float, float]]] | None = None, **more: Any
) -> None:
    """Latency percentiles and the run's scalars; `style` is `table` or `json`, `more` goes into the JSON.

    `bands` are the ends of 90 % bands by metric and statistic, shown under the numbers.
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

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("metric", no_wrap=True)
    for heading in _STATS[:-1] if bands else _STATS:
        table.add_column(heading, no_wrap=True, justify="right")
    for name, numbers in distributions.items():
        unit = metric(name).unit
        label = name if not unit or name.endswith(f"_{unit}") else f"{name}, {unit}"
        table.add_row(label, *(_shown(numbers[column.header]) for column in table.columns[1:]))
        if bands and any(high for _, high in bands.get(name, {}).values()):
            table.add_row("", *(_range(bands[name].get(str(c.header))) for c in table.columns[1:]), style="dim")
    console = Console()
    if distributions:
        console.print(table)
    summary = Table("metric", "unit", "value", *(["90 % band"] if bands else []))
    for name, value in scalars.items():
        if value is not None:
            unit = metric(name.removesuffix("_peak")).unit
            shown = [_range((bands or {}).get(name, {}).get("value"))] if bands else []
            summary.add_row(name, unit, _shown(value), *shown)
    console.print(summary)
    if bands:
        console.print("[dim]a–b: 90 % band from how far off the step times of a whole run may be[/]")
    console.print("requests: " + ", ".join(f"{count} {status}" for status, count in metrics.statuses().items()))


def print_rejections(recording: Recording) -> None:
    """How many requests were turned away, and why the first of them was."""
    reasons = [reason for reason in recording.table("requests", ["reason"])["reason"].to_pylist() if reason]
    if reasons:
        click.echo(f"{len(reasons)} turned away, the first because: {reasons[0]}")


def print_tiers(metrics: RunMetrics) -> None:
    """Which share of the prompt tokens came from each KV tier, if there were any."""
    if metrics.scalars()["tier_hit_rate"] is not None:
        shares = [f"{rate:.1%} from {tier}" for tier, rate in metrics.tier_hit_rates().items()]
        click.echo(f"of the prompt tokens were loaded: {', '.join(shares) or 'none'}")


def _range(band: tuple[float, float] | None) -> str:
    return "" if band is None else f"{_shown(band[0])}–{_shown(band[1])}"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return "-" if math.isnan(value) else f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return str(value)
