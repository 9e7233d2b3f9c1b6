"""The report of a run: latency percentiles, other metrics, and how its requests ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from planning.request_endings import RequestEndings
from serving.figures import shown_band
from serving.metrics import STATISTICS, metric
from serving.report import FIGURE, METRIC_AND_UNIT, Column, Line, Table
from traces.metrics.run_metrics import RunMetrics

Bands = Mapping[str, Mapping[str, tuple[float, float]]]

_SPARE = {"mean": 0, "p50": 0, "p90": 2, "p95": 1, "p99": 0, "max": 3}  # the order in which statistics are left out


def run_report(metrics: RunMetrics, bands: Bands | None = None) -> Iterator[Line | Table]:
    """Yield the tables of a run, and lines about how its requests ended.

    `bands` are the ends of 90 % bands by metric and statistic.
    """
    latencies = distributions(metrics, bands)
    if latencies.rows:
        yield latencies
    yield scalars(metrics, bands)
    if bands:
        yield Line("from, to: ends of the 90 % band, which follows from the error of step times", "note")
    outcome = RequestEndings.from_metrics(metrics)
    yield Line(f"requests: {outcome.text}")
    if outcome.shortfall:
        yield Line(f"{outcome.shortfall}: {outcome.latencies_of}", "warning")


def distributions(metrics: RunMetrics, bands: Bands | None = None) -> Table:
    """Return a table with a row for each metric that has values, and below it the ends of its band."""
    rows: list[list[str]] = []
    for name, distribution in metrics.distributions().items():
        if distribution.count:
            about, numbers = metric(name), distribution.as_dict()
            rows.append([name, *(about.shown(numbers[stat]) for stat in _SPARE), f"{distribution.count:,}"])
            ends = (bands or {}).get(name, {})
            if any(high for _, high in ends.values()):
                for end, which in enumerate(("from", "to")):
                    shown = (about.shown(ends[stat][end]) if stat in ends else "" for stat in _SPARE)
                    rows.append([f"  {which}", *shown, ""])
    stats = (Column(stat, FIGURE, STATISTICS[stat], spare) for stat, spare in _SPARE.items())
    return Table(
        (Column("metric", METRIC_AND_UNIT), *stats, Column("values", FIGURE, STATISTICS["count"], spare=4)), rows
    )


def scalars(metrics: RunMetrics, bands: Bands | None = None) -> Table:
    """Return a table with a row for each metric of the whole run that has a value."""
    rows = []
    for name, value in metrics.scalars().items():
        if value is not None:
            about, band = metric(name.removesuffix("_peak")), (bands or {}).get(name, {}).get("value")
            within = [shown_band(*map(about.read, band)) if band else ""] if bands else []
            rows.append((name, about.shown(value), *within, about.definition))
    banded = (Column("90 % band", FIGURE),) if bands else ()
    columns = (Column("metric", METRIC_AND_UNIT), Column("value", FIGURE), *banded, Column("definition", spare=1))
    return Table(columns, rows, sentences=True)
