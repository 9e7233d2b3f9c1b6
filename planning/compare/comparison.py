"""What one deployment or policy does better than another: differences that can be claimed, winners and losers.

Everything is of the same requests served twice, and a request is compared with itself. Which differences can be
claimed is decided for all of them together (`unit_bootstrap`), so that two runs that do not differ are called different
one time in twenty, however many numbers are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planning.compare.document import SHARES
from planning.compare.paired_runs import PairedRuns, Side
from planning.compare.unit_bootstrap import Difference, Floats, Jain, Percentile, Ratio, Statistic, differences
from serving.metrics import metric
from traces.distribution import PERCENTILES

LATENCIES = ("ttft_ms", "tpot_ms", "e2e_ms")
_JUDGED = ("ttft_ms", "e2e_ms")  # by which a request wins or loses
_RANKS = tuple(rank for rank in PERCENTILES if rank != 95)
_BEYOND = 10  # requests that must lie beyond a percentile for it to be compared


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """A statistic of both sides. `better` is `A` or `B` where a difference can be claimed, else empty."""

    metric: str
    stat: str
    a: float
    b: float
    low: float
    high: float
    better: str

    @property
    def percent(self) -> float:
        """The difference in percent of A; of a share in percentage points."""
        if self.metric in SHARES:
            return 100 * (self.b - self.a)
        return 100 * (self.b - self.a) / self.a if self.a else math.nan


@dataclass(frozen=True, slots=True)
class Tally:
    """Of the requests of a group: how many B serves better or worse than A by more than the threshold.

    by, group   `all`, or the tenants and SLO classes one by one
    mean_a, mean_b      of the requests that finished on both sides
    """

    metric: str
    by: str
    group: str
    gain: int
    lose: int
    same: int
    mean_a: float
    mean_b: float


@dataclass(frozen=True)
class Comparison:
    """The outcome. `unit_is` says what was resampled: `runs`, or `blocks` of consecutive arrivals.

    threshold   relative change of a request's latency that counts as a gain or a loss
    carry_over  in some rows blocks go together more than the intervals allow for
    """

    rows: list[ComparedRow]
    tallies: list[Tally]
    requests: int
    runs: int
    units: int
    unit_is: str
    threshold: float
    carry_over: bool

    @property
    def claims(self) -> list[ComparedRow]:
        """The rows in which a difference can be claimed."""
        return [row for row in self.rows if row.better]

    def verdict(self) -> str:
        """One sentence."""
        if not self.claims:
            if all(row.a == row.b for row in self.rows):
                return "no difference can be claimed: both sides do the same"
            widest = max(self.rows, key=lambda row: abs(row.percent) if math.isfinite(row.percent) else 0.0)
            if math.isnan(widest.low):
                return "no difference can be claimed: there are too few requests"
            whole = 1.0 if widest.metric in SHARES else abs(widest.a)
            reach = 100 * (widest.high - widest.low) / 2 / whole if whole else math.nan
            if not math.isfinite(widest.percent) or not math.isfinite(reach):
                return "no difference can be claimed: nothing finishes on a side, or too little to compare"
            return (
                f"no difference can be claimed: the largest, {_named(widest)} {widest.percent:+.1f} {_in(widest)}, "
                f"is known to +-{reach:.1f} {_in(widest)} only"
            )
        parts = []
        for side, verb in (("B", "better"), ("A", "worse")):
            won = [row for row in self.claims if row.better == side]
            if won:
                best = {row.metric: row for row in sorted(won, key=lambda row: abs(row.percent))}
                shown = [f"{_named(row)} {row.percent:+.1f} {_in(row)}" for row in best.values()]
                parts.append(f"{verb} in {', '.join(reversed(shown))}")
        return f"B is {' but '.join(parts)}"


def compare(pairs: PairedRuns, threshold: float = 0.05, seed: int = 0) -> Comparison:
    """Compare B with A. `threshold` is the change of a request's latency that counts, `seed` the bootstrap's."""
    named = list(_statistics(pairs))
    serial = pairs.unit_is == "blocks"
    ratios = [name in LATENCIES or name == "output_throughput" for (name, _), _, _ in named]
    found = differences([(a, b) for _, a, b in named], pairs.units, seed, serial, ratios)
    rows = [_row(*name, difference) for (name, _, _), difference in zip(named, found, strict=True)]
    if serial:
        rows += list(_throughputs(pairs))
    return Comparison(
        rows=rows,
        tallies=list(_tallies(pairs, threshold)),
        requests=len(pairs.unit),
        runs=pairs.runs,
        units=pairs.units,
        unit_is=pairs.unit_is,
        threshold=threshold,
        carry_over=any(difference.carried for difference in found),
    )


def _statistics(pairs: PairedRuns) -> Iterator[tuple[tuple[str, str], Statistic, Statistic]]:
    """Everything that is compared, as `(metric, stat)` and the statistic of each side."""
    sides, unit, units = (pairs.a, pairs.b), pairs.unit, pairs.units
    for name in LATENCIES:
        values = [side.values(name) for side in sides]
        fewest = min(int((~np.isnan(v)).sum()) for v in values)
        if fewest:
            a, b = (Ratio.mean(v, unit, units) for v in values)
            yield (name, "mean"), a, b
        for rank in _RANKS:
            if fewest * (100 - rank) >= 100 * _BEYOND:
                low, high = (Percentile(v, unit, units, rank) for v in values)
                yield (name, f"p{rank}"), low, high
    if pairs.a.attainable():
        a, b = (Ratio.mean(side.good.astype(float), unit, units) for side in sides)
        yield ("slo_attainment", "value"), a, b
    if not all(side.finished.all() for side in sides):
        a, b = (Ratio.mean(side.finished.astype(float), unit, units) for side in sides)
        yield ("finished", "share"), a, b
    tenants, tenant = np.unique(pairs.a.labels("tenant"), return_inverse=True)
    if len(tenants) > 1:
        left, right = (Jain(_by_unit_and(tenant, len(tenants), side.served, pairs)) for side in sides)
        yield ("jain_fairness", "value"), left, right
    if pairs.unit_is == "runs":
        a, b = (Ratio(*_tokens_and_seconds(side)) for side in sides)
        yield ("output_throughput", "value"), a, b


def _throughputs(pairs: PairedRuns) -> Iterator[ComparedRow]:
    """A block has no throughput of its own, so that it comes without an interval."""
    whole = np.ones((1, pairs.runs), dtype=np.int64)
    a, b = (float(Ratio(*_tokens_and_seconds(side))(whole)[0]) for side in (pairs.a, pairs.b))
    yield ComparedRow("output_throughput", "value", a, b, math.nan, math.nan, "")


def _tokens_and_seconds(side: Side) -> tuple[Floats, Floats]:
    """Output tokens of finished requests, and measurement window, of each run."""
    seconds = np.array([run.window_s or 0.0 for run in side.runs])
    rates = np.array([run.scalars()["output_throughput"] or 0.0 for run in side.runs])
    return rates * seconds, seconds


def _by_unit_and(index: NDArray[Any], count: int, values: Floats, pairs: PairedRuns) -> Floats:
    """Sums of `values` by unit and index: `[units, count]`."""
    sums: Floats = np.bincount(pairs.unit * count + index, values, pairs.units * count).astype(np.float64)
    return sums.reshape(pairs.units, count)


def _row(name: str, stat: str, found: Difference) -> ComparedRow:
    better = ""
    if found.claimed:
        lower = name in LATENCIES or metric(name).better == "lower" if name != "finished" else False
        better = "B" if (found.difference < 0) == lower else "A"
    return ComparedRow(name, stat, found.a, found.b, found.low, found.high, better)


def _tallies(pairs: PairedRuns, threshold: float) -> Iterator[Tally]:
    groups = [("all", "all", np.ones(len(pairs.unit), dtype=bool))]
    for column in ("tenant", "slo_class"):
        labels = pairs.a.labels(column)
        names = np.unique(labels)
        groups += [(column, str(name), labels == name) for name in names if len(names) > 1]
    for judged in _JUDGED:
        a, b = pairs.a.values(judged), pairs.b.values(judged)
        # One that does not finish has waited for ever.
        longer, shorter = (np.where(np.isnan(v), np.inf, v) for v in (b, a))
        gains, loses = longer < shorter * (1 - threshold), longer > shorter * (1 + threshold)
        both = ~np.isnan(a) & ~np.isnan(b)
        for by, group, members in groups:
            gain, lose, count = (int((mask & members).sum()) for mask in (gains, loses, members))
            means = [float(v[both & members].mean()) if (both & members).any() else math.nan for v in (a, b)]
            yield Tally(judged, by, group, gain, lose, count - gain - lose, *means)


def _named(row: ComparedRow) -> str:
    label = "share of requests that finish" if row.metric == "finished" else metric(row.metric).label
    return label if row.stat in ("value", "share") else f"{label} {row.stat}"


def _in(row: ComparedRow) -> str:
    return "points" if row.metric in SHARES else "%"


@dataclass(frozen=True, slots=True)
class Ranked:
    """A row of which the simulator or the engine claims a difference, and whether they agree.

    outcome     `holds`: both claim the same; `reversed`: they claim opposites; `open`: the engine claims nothing;
                `missed`: only the engine claims something
    """

    metric: str
    stat: str
    simulated_percent: float
    real_percent: float
    outcome: str


def ranking(simulated: Comparison, real: Comparison) -> list[Ranked]:
    """Whether what the simulator ranks A and B by holds on the real engine."""
    measured = {(row.metric, row.stat): row for row in real.rows}
    found = []
    for row in simulated.rows:
        other = measured.get((row.metric, row.stat))
        if other is None or not (row.better or other.better):
            continue
        if not other.better:
            outcome = "open"
        elif not row.better:
            outcome = "missed"
        else:
            outcome = "holds" if row.better == other.better else "reversed"
        found.append(Ranked(row.metric, row.stat, row.percent, other.percent, outcome))
    return found
