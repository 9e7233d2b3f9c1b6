"""The report of a run: latency percentiles, other metrics, and how its requests ended.

The endings matter because a run that loses most of its requests looks fast by the latencies of the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from tokentwin.planning.capacity import Capacity
from tokentwin.serving.answers.figures import shown_band, shown_share
from tokentwin.serving.answers.report import FIGURE, METRIC_AND_UNIT, Column, Line, Table
from tokentwin.serving.metrics import STATISTICS, metric
from tokentwin.traces.metrics.run_metrics import RunMetrics

ENOUGH = 0.99  # share of the requests that must finish for their latencies to describe the run


def status_word(status: str) -> str:
    """Return a status of the dataset `requests` in words."""
    return status.replace("_", " ")


@dataclass(frozen=True)
class RequestEndings:
    """Number of requests by final status, largest number first."""

    counts: Mapping[str, int]

    @classmethod
    def from_metrics(cls, metrics: RunMetrics) -> RequestEndings:
        return cls(metrics.statuses())

    @property
    def text(self) -> str:
        """The number of requests by final status, as text."""
        return ", ".join(f"{count:,} {status_word(status)}" for status, count in self.counts.items())

    @property
    def shortfall(self) -> str | None:
        """The share of requests that did not finish, if it is more than 1 %."""
        if self._finished >= ENOUGH * self._count:
            return None
        share = f"{shown_share(1 - self._finished / self._count, 1)} did not finish"
        return share if self._finished else "no request finished"

    @property
    def latencies_of(self) -> str:
        """A clause that says how many requests the latencies cover."""
        if not self._finished:
            return "there are no latencies"
        return f"latencies are those of the {self._finished:,} of {self._count:,} requests that finished"

    @property
    def _finished(self) -> int:
        return self.counts.get("finished", 0)

    @property
    def _count(self) -> int:
        return sum(self.counts.values())


Bands = Mapping[str, Mapping[str, tuple[float, float]]]

_SPARE = {"mean": 0, "p50": 0, "p90": 2, "p95": 1, "p99": 0, "max": 3}  # the order in which statistics are left out


def run_report(
    metrics: RunMetrics, bands: Bands | None = None, capacity: Capacity | None = None
) -> Iterator[Line | Table]:
    """Yield the tables of a run, and lines about how its requests ended.

    `bands` are the ends of 90 % bands by metric and statistic. If the arrival rate lies in the band of the `capacity`,
    latencies that include waiting are left out.
    """
    if capacity:
        yield Line(capacity.sentence, "warning")
    latencies = distributions(metrics, bands, capacity.uncertain if capacity else ())
    if latencies.rows:
        yield latencies
    yield scalars(metrics, bands)
    if bands:
        text = "from, to: ends of the 90 % band, which follows from the error of step times"
        if "power_w" in bands:
            text += " (power, energy and carbon: from errors for published runs)"
        yield Line(text, "note")
    outcome = RequestEndings.from_metrics(metrics)
    yield Line(f"requests: {outcome.text}")
    if outcome.shortfall:
        yield Line(f"{outcome.shortfall}: {outcome.latencies_of}", "warning")


def distributions(metrics: RunMetrics, bands: Bands | None = None, without: Collection[str] = ()) -> Table:
    """Return a table with a row for each metric that has values, and below it the ends of its band.

    Metrics in `without` are left out.
    """
    rows: list[list[str]] = []
    for name, distribution in metrics.distributions().items():
        if distribution.count and name not in without:
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
