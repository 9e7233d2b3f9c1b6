"""A comparison of two deployments or policies: differences that can be claimed, winners and losers.

Both sides served the same requests, and each request on one side is compared with the same request on the other. All
numbers are tested together (`unit_bootstrap`): two runs that do not differ are called different one time in twenty,
however many numbers are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokentwin.planning.compare.document import (
    SHARES,
    Cdfs,
    Compared,
    Curve,
    Curves,
    Ranked,
    Row,
    Side,
    Tally,
    Tenant,
    Units,
    change_of,
)
from tokentwin.planning.compare.paired_runs import PairedRuns, SideRequests
from tokentwin.planning.compare.unit_bootstrap import (
    Difference,
    Floats,
    Jain,
    Percentile,
    Ratio,
    Statistic,
    differences,
)
from tokentwin.serving.answers.figures import shown_change, shown_number, shown_share
from tokentwin.serving.metrics import metric
from tokentwin.traces.tables import PERCENTILES, ecdf

LATENCIES = ("ttft_ms", "tpot_ms", "e2e_ms")
_JUDGED = ("ttft_ms", "e2e_ms")  # the latencies by which a request wins or loses
_RANKS = tuple(rank for rank in PERCENTILES if rank != 95)
_BEYOND = 10  # number of requests that must lie beyond a percentile for it to be compared
_MANY_LOST = 0.01  # share of requests
_NAMED = 3  # maximum number of differences that a verdict names for a side
_POINTS = 240  # maximum number of points of a distribution that is drawn


def compare(pairs: PairedRuns, a: Side, b: Side, threshold: float = 0.05, seed: int = 0) -> Compared:
    """Compare B with A; `a` and `b` describe what ran on each side.

    `threshold` is the relative change of a request's latency that counts. `seed` is the seed of the bootstrap.
    """
    named = list(_statistics(pairs))
    serial = pairs.unit_is == "blocks"
    ratios = [name in LATENCIES or name.endswith("_throughput") for (name, _), _, _ in named]
    changes = differences([(of_a, of_b) for _, of_a, of_b in named], pairs.units, seed, serial, ratios)
    rows = [_row(*name, difference) for (name, _, _), difference in zip(named, changes, strict=True)]
    if serial:
        rows.append(_throughput(pairs))
    tallies = tuple(_tallies(pairs, threshold))
    a, b = (side.at_rates(one.overload) for side, one in ((a, pairs.a), (b, pairs.b)))
    return Compared(
        verdict="; ".join(filter(None, (overload(a, b), verdict(rows, tallies)))),
        winner=winner(rows),
        difference=any(row.better for row in rows),
        requests=len(pairs.unit),
        runs=pairs.runs,
        units=Units(of=pairs.unit_is, count=pairs.units, carry_over=any(difference.carried for difference in changes)),
        rows=tuple(rows),
        threshold=threshold,
        tallies=tallies,
        cdfs=Cdfs(a=_curves(pairs.a), b=_curves(pairs.b)),
        tenants=tuple(_tenants(pairs)),
        a=a,
        b=b,
    )


def overload(a: Side, b: Side) -> str:
    """Return a clause about the sides that are overloaded, and what they can serve; empty if both keep up."""
    sides = [(name, side) for name, side in (("A", a), ("B", b)) if side.served_rate is not None]
    if not sides:
        return ""
    arrive = shown_number(max(side.arrival_rate or 0.0 for _, side in sides))
    served = " and ".join(f"{name} serves {shown_number(side.served_rate)}" for name, side in sides)
    who = "both sides are" if len(sides) > 1 else f"{sides[0][0]} is"
    return f"{who} overloaded: {arrive} requests/s arrive, {served}"


def verdict(rows: Sequence[Row], tallies: Sequence[Tally] = ()) -> str:
    """Return the claims in one sentence that begins with the better side, and names what it loses.

    Of several groups in `tallies`, the sentence names the one that loses most.
    """
    claims = [row for row in rows if row.better]
    if not claims:
        if all(row.a == row.b and row.a is not None for row in rows):
            return "no difference can be claimed: both sides do the same"
        widest = max(rows, key=lambda row: abs(row.percent or 0.0))
        if widest.low is None or widest.high is None:
            return "no difference can be claimed: there are too few requests"
        whole = 1.0 if widest.metric in SHARES else abs(widest.a or 0.0)
        if widest.percent is None or not whole:
            return "no difference can be claimed: too few requests finish on a side"
        low, high = 100 * widest.low / whole, 100 * widest.high / whole
        between = f"{shown_change(low, unit='')} and {change_of(widest.metric, high)}"
        return f"no difference can be claimed: the largest, {_in_words(widest)}, lies between {between}"
    side = winner(rows)
    parts = {side: _most_of([row for row in claims if row.better == side]) for side in "BA"}
    more = f"; {hit}" if (hit := _hit_most(tallies)) else ""
    if any(row.metric == "finished" for row in claims):
        more += "; latencies cover only requests that finish"
    if not side:
        return f"neither side is better overall: B is better in {parts['B']}, and worse in {parts['A']}{more}"
    loser = "A" if side == "B" else "B"
    lead, but = ("better", "worse") if side == "B" else ("worse", "better")
    rest = f", but {but} in {parts[loser]}" if parts[loser] else ""
    return f"B is {lead}: {parts[side]}{rest}{more}"


def winner(rows: Sequence[Row]) -> str:
    """Return the side that is better overall, or an empty string.

    The first of these metrics that claims a difference decides: the attainment; the share of finished requests, if a
    side finishes at least 1 % fewer; E2E; all metrics. The side is better if it wins every claim of the metric.
    Differences are not counted, because most metrics of a run depend on each other.
    """
    claims = [row for row in rows if row.better]
    for decide in (
        lambda row: row.metric == "slo_attainment",
        lambda row: row.metric == "finished" and abs(row.b - row.a) >= _MANY_LOST,
        lambda row: row.metric in ("e2e_ms", "finished"),
        lambda row: True,
    ):
        if sides := {row.better for row in claims if decide(row)}:
            return sides.pop() if len(sides) == 1 else ""
    return ""


def _hit_most(tallies: Sequence[Tally]) -> str:
    """Return a clause about the group of which the largest share of requests loses; empty without groups or losers."""
    groups = [tally for tally in tallies if tally.by != "all" and tally.lose > tally.gain]
    if not groups:
        return ""
    worst = max(groups, key=lambda tally: tally.lose / (tally.gain + tally.lose + tally.same))
    share = shown_share(worst.lose / (worst.gain + worst.lose + worst.same))
    kind = {"tenant": "tenant", "slo_class": "class"}[worst.by]
    label = metric(worst.metric).label
    return f"{kind} {worst.group or '(none)'} loses most: {share} of its requests have a longer {label} with B"


def _lost(rows: Sequence[Row]) -> dict[str, float]:
    """Return, for each side, the share of requests that only the other side finishes, if it can be claimed, else 0."""
    more = next(((row.b or 0.0) - (row.a or 0.0) for row in rows if row.metric == "finished" and row.better), 0.0)
    return {"A": max(more, 0.0), "B": max(-more, 0.0)}


def _most_of(rows: Sequence[Row]) -> str:
    """Return the largest differences in words, one for each metric; the attainment comes first."""
    order = sorted(rows, key=lambda row: (row.metric == "slo_attainment", abs(row.percent or 0.0)))
    by_metric = {row.metric: row for row in order}
    return ", ".join([_in_words(row) for row in reversed(by_metric.values())][:_NAMED])


def _statistics(pairs: PairedRuns) -> Iterator[tuple[tuple[str, str], Statistic, Statistic]]:
    """Yield every compared number: `(metric, stat)` and the statistic of each side."""
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
    if pairs.bounds:
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
        a, b = (Ratio(*_tokens_and_seconds(side, _rate(pairs))) for side in sides)
        yield (_rate(pairs), "value"), a, b


def _rate(pairs: PairedRuns) -> str:
    """Return the name of the throughput that is compared: of prompt tokens, if no request gets any tokens."""
    outputs = any(run.scalars()["output_throughput"] for side in (pairs.a, pairs.b) for run in side.runs)
    return "output_throughput" if outputs else "input_throughput"


def _throughput(pairs: PairedRuns) -> Row:
    """Return the row of the throughput, without an interval, because a block has no throughput."""
    whole = np.ones((1, pairs.runs), dtype=np.int64)
    name = _rate(pairs)
    a, b = (float(Ratio(*_tokens_and_seconds(side, name))(whole)[0]) for side in (pairs.a, pairs.b))
    return _row(name, "value", Difference(a, b, math.nan, math.nan))


def _tokens_and_seconds(side: SideRequests, name: str) -> tuple[Floats, Floats]:
    """Return the tokens of the throughput `name`, and the measurement window in seconds, for each run."""
    seconds = np.array([run.window_s or 0.0 for run in side.runs])
    rates = np.array([run.scalars()[name] or 0.0 for run in side.runs])
    return rates * seconds, seconds


def _by_unit_and(index: NDArray[Any], count: int, values: Floats, pairs: PairedRuns) -> Floats:
    """Return sums of `values` by unit and index: `[units, count]`."""
    sums: Floats = np.bincount(pairs.unit * count + index, values, pairs.units * count).astype(np.float64)
    return sums.reshape(pairs.units, count)


def _row(name: str, stat: str, difference: Difference) -> Row:
    better = ""
    if difference.claimed:
        lower = name in LATENCIES or metric(name).better == "lower" if name != "finished" else False
        better = "B" if (difference.difference < 0) == lower else "A"
    whole = 1.0 if name in SHARES else difference.a
    return Row(
        metric=name,
        stat=stat,
        a=difference.a,
        b=difference.b,
        low=difference.low,
        high=difference.high,
        percent=100 * difference.difference / whole if whole else math.nan,
        better=better,
    )


def _tallies(pairs: PairedRuns, threshold: float) -> Iterator[Tally]:
    groups = [("all", "all", np.ones(len(pairs.unit), dtype=bool))]
    for column in ("tenant", "slo_class"):
        labels = pairs.a.labels(column)
        names = np.unique(labels)
        groups += [(column, str(name), labels == name) for name in names if len(names) > 1]
    for judged in _JUDGED:
        a, b = pairs.a.values(judged), pairs.b.values(judged)
        if np.isnan(a).all() and np.isnan(b).all() and pairs.a.finished.any():
            continue  # pooling requests have no first token
        # A request that does not finish has waited for ever.
        whole_a, whole_b = (np.where(np.isnan(v), np.inf, v) for v in (a, b))
        gains, loses = whole_b < whole_a * (1 - threshold), whole_b > whole_a * (1 + threshold)
        both = ~np.isnan(a) & ~np.isnan(b)
        for kind, group, members in groups:
            gain, lose, count = (int((mask & members).sum()) for mask in (gains, loses, members))
            mean_a, mean_b = (float(v[both & members].mean()) if (both & members).any() else None for v in (a, b))
            rank = next((rank for rank in reversed(_RANKS) if count * (100 - rank) >= 100 * _BEYOND), None)
            yield Tally(
                metric=judged,
                by=kind,
                group=group,
                gain=gain,
                lose=lose,
                same=count - gain - lose,
                mean_a=mean_a,
                mean_b=mean_b,
                tail=f"p{rank}" if rank else "",
                tail_a=_percentile(whole_a[members], rank),
                tail_b=_percentile(whole_b[members], rank),
                attainment_a=float(pairs.a.good[members].mean()) if pairs.bounds else None,
                attainment_b=float(pairs.b.good[members].mean()) if pairs.bounds else None,
            )


def _percentile(values: Floats, rank: float | None) -> float | None:
    return None if rank is None else float(np.percentile(values, rank, method="inverted_cdf"))


def _curves(side: SideRequests) -> Curves:
    return Curves(**{latency: _curve(side.values(latency)) for latency in Curves.model_fields})


def _curve(values: Floats) -> Curve:
    x, y = ecdf(values, _POINTS)
    return Curve(x=tuple(float(f"{v:.6g}") for v in x), y=tuple(round(float(v), 3) for v in y))


def _tenants(pairs: PairedRuns) -> Iterator[Tenant]:
    labels = pairs.a.labels("tenant")
    names = np.unique(labels)
    served = [side.served / max(side.served.sum(), 1) for side in (pairs.a, pairs.b)]
    for name in names if len(names) > 1 else ():
        a, b = (100 * float(share[labels == name].sum()) for share in served)
        yield Tenant(tenant=str(name) or "(none)", requests=100 * float((labels == name).mean()), a=a, b=b)


def _in_words(row: Row) -> str:
    label = "share of requests that finish" if row.metric == "finished" else metric(row.metric).label
    named = label if row.stat in ("value", "share") else f"{label} {row.stat}"
    change = f"{named} {change_of(row.metric, row.percent)}"
    if row.metric != "slo_attainment" or row.a is None or row.b is None:
        return change
    return f"{change} (from {shown_share(row.a)} to {shown_share(row.b)})"


def ranking(simulated: Sequence[Row], real: Sequence[Row]) -> Iterator[Ranked]:
    """Yield the rows in which the simulator or the engine claims a difference, and whether the two agree."""
    measured = {(row.metric, row.stat): row for row in real}
    for row in simulated:
        other = measured.get((row.metric, row.stat))
        if other is None or not (row.better or other.better):
            continue
        if not other.better:
            outcome = "open"
        elif not row.better:
            outcome = "missed"
        else:
            outcome = "holds" if row.better == other.better else "reversed"
        yield Ranked(
            metric=row.metric,
            stat=row.stat,
            simulated_percent=row.percent,
            real_percent=other.percent,
            outcome=outcome,
        )
