"""A comparison as one document: its claims, its curves, what ran, and its inputs.

`tokentwin compare` prints and saves it, a job of the Policy lab keeps it, and `tokentwin export` reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Self

import pyarrow as pa
from pydantic import ConfigDict

from tokentwin.serving.answers.document import Document, Number, Part, fact
from tokentwin.serving.answers.figures import counted, shown_change, shown_number, shown_share
from tokentwin.serving.answers.report import BAND, COUNT, FIGURE, NUMBER, Column, Line, Table
from tokentwin.serving.metrics import METRICS, axis_of, label_of
from tokentwin.traces.document_table import table_of

SHARES = ("slo_attainment", "finished")  # changes are shown in points: from 29 % to 52 % is +23 points, not +76 %
_METRIC = "metric of the glossary, or `finished`: the share of requests that finish"
_STAT = "statistic of the metric; `value` if the metric has only one"
_OF = (Column("metric"), Column("stat"))
_TALLIED = ("B gains", "B loses", "same")


class Units(Part):
    """The resampled units."""

    of: str = fact("kind of unit: `runs`, or `blocks` of consecutive arrivals")
    count: int = fact("number of units")
    carry_over: bool = fact("whether neighbouring blocks are more alike than the intervals allow for")


class Row(Part):
    """A statistic of both sides."""

    metric: str = fact(_METRIC)
    stat: str = fact(_STAT)
    a: Number = fact("value on side A", "the row's")
    b: Number = fact("value on side B", "the row's")
    low: Number = fact("lower end of the 95 % interval of B - A, which holds for all rows together", "the row's")
    high: Number = fact("upper end of the same interval", "the row's")
    percent: Number = fact("B - A in percent of A; for a share in percentage points", "%")
    better: str = fact("A or B if a difference can be claimed, else empty")


class Tally(Part):
    """Winners and losers among the requests of a group."""

    metric: str = fact("metric by which a request gains or loses")
    by: str = fact("kind of group: all, a tenant, an SLO class")
    group: str = fact("name of the group")
    gain: int = fact("requests that B serves better by the threshold or more", "requests")
    lose: int = fact("requests that B serves worse by the threshold or more", "requests")
    same: int = fact("requests that neither gain nor lose", "requests")
    mean_a: Number = fact("mean on side A, of the requests that finished on both", "ms")
    mean_b: Number = fact("mean on side B, of the same requests", "ms")
    tail: str = fact("the highest percentile with ten requests of the group beyond it; else empty", default="")
    tail_a: Number = fact("the percentile `tail` on side A; null if an unfinished request has it", "ms", default=None)
    tail_b: Number = fact("the percentile `tail` on side B; null if an unfinished request has it", "ms", default=None)
    attainment_a: Number = fact("share that meets the SLOs on side A; null without SLOs", "fraction", default=None)
    attainment_b: Number = fact("share that meets the SLOs on side B; null without SLOs", "fraction", default=None)


class Curve(Part):
    """A distribution of latencies."""

    x: tuple[float, ...] = fact("values of the metric, from low to high", "ms")
    y: tuple[float, ...] = fact("percentage of the requests at or below each value", "%")


class Curves(Part):
    """The distributions of one side, by metric."""

    ttft_ms: Curve = fact("TTFT")
    tpot_ms: Curve = fact("TPOT")
    e2e_ms: Curve = fact("E2E")


class Cdfs(Part):
    """The distributions of both sides."""

    a: Curves = fact("side A")
    b: Curves = fact("side B")


class Tenant(Part):
    """The shares of a tenant in the requests and in the served tokens."""

    tenant: str = fact("name of the tenant")
    requests: float = fact("share of all requests", "%")
    a: float = fact("share of the tokens served on side A before the last arrival", "%")
    b: float = fact("share of the tokens served on side B before the last arrival", "%")


class RanDeployment(Part):
    """A whole deployment; the fields named here exist in every version of it."""

    model_config = ConfigDict(extra="allow")

    policy: str = fact("the scheduling policy")
    scheduler: dict[str, Any] = fact("settings of the scheduler")


class Side(Part):
    """One side of a comparison: a simulated deployment, or a recorded one."""

    name: str = fact("name of the side in the question", default="")
    clock: str = fact("clock of recordings", default="")
    runs: int | None = fact("number of recordings; null if the side was simulated", default=None)
    level: str = fact("trust in the side's step times", default="")
    reason: str = fact("reason of the level", default="")
    step_error: str = fact(
        "sentence about the error that all step times of a simulated side have in common; else empty", default=""
    )
    calibration: str = fact("id of the calibration that timed the steps; empty for a recording", default="")
    deployment: RanDeployment = fact("the deployment of one replica")
    replicas: int | None = fact("engines of a simulated side", default=None)
    router: str | None = fact("router of a simulated side", default=None)
    defaults: tuple[str, ...] = fact(
        "settings that a simulated side leaves to its engine, a line for each pool", default=()
    )
    seen_by: str = fact("sentence that says that latencies are those that clients see; else empty", default="")
    arrival_rate: Number = fact("arrivals, if the side is overloaded", "requests/s", default=None)
    served_rate: Number = fact("requests that the side serves, if it is overloaded", "requests/s", default=None)

    def at_rates(self, rates: tuple[float, float] | None) -> Self:
        """Return the side with its rates of arrivals and of served requests, if it is overloaded."""
        arrival, served = rates or (None, None)
        return type(self).model_validate({**vars(self), "arrival_rate": arrival, "served_rate": served})


class Ranked(Part):
    """A row for which the simulator or the engine claims a difference, and whether they agree."""

    metric: str = fact(_METRIC)
    stat: str = fact(_STAT)
    simulated_percent: Number = fact("B - A in the simulator, in percent of A; for a share in percentage points", "%")
    real_percent: Number = fact("B - A on the real engine, in percent of A; for a share in percentage points", "%")
    outcome: str = fact("holds, open (the engine claims nothing), reversed, missed (only the engine claims)")


class SimulatedError(Part):
    """A simulated number beside the real one."""

    metric: str = fact(_METRIC)
    stat: str = fact(_STAT)
    side: str = fact("A or B")
    simulated: Number = fact("value in the simulator", "the row's")
    real: Number = fact("value on the real engine", "the row's")
    error: Number = fact("error of the simulated value in percent of the real one; for a share in points", "%")
    weather_simulated: Number = fact(
        "value in the simulator, with the machine's speed of the real runs known", "the row's", default=None
    )
    weather_error: Number = fact("error of that value against the real one", "%", default=None)


class Compared(Part):
    """A comparison of two sides on the same requests."""

    verdict: str = fact("claim about the difference, in a sentence")
    difference: bool = fact("whether any difference can be claimed", default=False)
    winner: str = fact("A or B if that side is better overall, else empty", default="")
    requests: int = fact("number of requests compared, in all runs of a side", default=0)
    runs: int = fact("number of runs of each side", default=1)
    units: Units = fact("units that were resampled")
    rows: tuple[Row, ...] = fact("every number of both sides with its difference", min_length=1)
    threshold: float = fact("relative change of a request's latency that counts as a gain or a loss", "fraction")
    tallies: tuple[Tally, ...] = fact("winners and losers, by group")
    cdfs: Cdfs = fact("distributions of latency")
    tenants: tuple[Tenant, ...] = fact("each tenant's share of requests and of served tokens; empty for one tenant")
    a: Side = fact("deployment or recordings of side A")
    b: Side = fact("deployment or recordings of side B")

    def shown(self) -> Iterator[Line | Table]:
        """Yield all numbers of both sides, winners and losers, and the verdict with its basis."""
        yield self.shown_rows()
        yield self.shown_tallies()
        yield Line(self.basis, "note")
        yield from self.cautions()
        yield Line(self.verdict, "headline")

    def shown_rows(self) -> Table:
        """Return every number of both sides with its difference."""
        columns = (
            *_OF,
            Column("A", NUMBER),
            Column("B", NUMBER),
            Column("B - A", NUMBER),
            Column("change", FIGURE, "B - A in percent of A; for a share (attainment, finish) in points."),
            Column("95 % interval", BAND, "Interval of B - A in the row's unit. It holds for all rows together."),
            Column("better"),
        )
        rows = []
        for row in self.rows:
            change = None if row.a is None or row.b is None else row.b - row.a
            more = (change_of(row.metric, row.percent), (row.low, row.high), row.better)
            rows.append((axis_of(row.metric), row.stat, row.a, row.b, change, *more))
        return Table(columns, rows)

    def shown_tallies(self) -> Table:
        """Return the attainment, the tail, and winners and losers among the requests, by group."""
        pairs = [Column(f"{name} {side}", NUMBER) for name in ("mean", "tail") for side in "AB"]
        bounded = any(tally.attainment_a is not None for tally in self.tallies)
        shares = [Column(f"within\nSLOs {side}", FIGURE) for side in "AB"] if bounded else []
        rows = []
        for tally in self.tallies:
            members = tally.group if tally.by == "all" else f"{tally.by} {tally.group or '(none)'}"
            kept = [shown_share(share, 1) for share in (tally.attainment_a, tally.attainment_b)] if bounded else []
            counts, means = (tally.gain, tally.lose, tally.same), (tally.mean_a, tally.mean_b)
            rows.append(
                (axis_of(tally.metric), members, *kept, *counts, *means, tally.tail_a, tally.tail_b, tally.tail)
            )
        columns = (Column("metric"), Column("of"), *shares, *(Column(name, COUNT) for name in _TALLIED), *pairs)
        return Table((*columns, Column("tail")), rows)

    @property
    def basis(self) -> str:
        """What was resampled for the intervals, and when a request gains or loses."""
        units = self.units
        unit = counted(units.count, units.of.removesuffix("s")) + (" of arrivals" if units.of == "blocks" else "")
        finished = next((row for row in self.rows if row.metric == "finished"), None)
        lost = ""
        if finished is not None:
            a, b = shown_share(finished.a, 1), shown_share(finished.b, 1)
            lost = f" {a} of the requests finish on A, {b} on B; means cover requests that finish on both sides."
        return (
            f"{counted(self.requests, 'request')}, resampled by {unit}; the intervals hold for all rows together. "
            f"A request gains or loses if its latency changes by {100 * self.threshold:g} % or more.{lost}"
        )

    def cautions(self) -> Iterator[Line]:
        """Yield warnings about the figures."""
        if self.units.carry_over:
            wide = "intervals are wide because queues last longer than blocks; compare longer runs, or several seeds"
            yield Line(wide, "warning")


class ComparisonDocument(Compared, Document):
    """The answer to a comparison; beside real runs it may have simulations of the same runs."""

    what: ClassVar[str] = "a comparison"
    where: ClassVar[str] = "comparison"

    disturbed: bool = fact("whether the machine was disturbed while the real runs were recorded", default=False)
    disturbance: str = fact("description of the disturbance; empty for simulated runs", default="")
    simulated: Compared | None = fact("the real runs, simulated", default=None)
    same_weather: Compared | None = fact("the real runs, simulated with their machine's speed known", default=None)
    ranking: tuple[Ranked, ...] | None = fact(
        "differences that simulator or engine claims, and whether the two agree", default=None
    )
    assumed: str = fact("sentence about traffic that was made up; empty for a trace or a specification", default="")
    version: str = fact("version of tokentwin", default="")
    inputs: dict[str, Any] = fact('`{"command": ...}`, or the inputs of the page', default={})

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the tables; three of them exist only if real runs were also simulated."""
        return ("rows", "tallies", *(("simulated", "errors", "outcomes") if self.simulated else ()))

    def table(self, name: str) -> pa.Table:
        """Return one of the tables.

        Args:
            rows: every number of both sides with its difference
            tallies: winners and losers, by group
            simulated: the same columns as `rows`, for simulations of the real runs
            errors: every simulated number beside the real number, by side
            outcomes: whether the engine confirms the simulator's claims
        """
        match name:
            case "tallies":
                return table_of(Tally, self.tallies)
            case "outcomes":
                return table_of(Ranked, self.ranking or ())
            case "errors":
                return _with_units(table_of(SimulatedError, self.errors()))
            case _:
                compared = self.simulated if name == "simulated" and self.simulated else self
                return _with_units(table_of(Row, compared.rows))

    def called(self, a: str, b: str) -> Self:
        """Return the document with the names `a` and `b` for its sides."""
        return self.model_copy(
            update={key: getattr(self, key).model_copy(update={"name": name}) for key, name in (("a", a), ("b", b))}
        )

    def errors(self) -> list[SimulatedError]:
        """Return the error of each simulated number against the real one; empty if nothing was simulated."""
        same = self.same_weather.rows if self.same_weather else ()
        return simulated_errors(self.simulated.rows, self.rows, same) if self.simulated else []

    def report(self) -> Iterator[Line | Table]:
        if self.a.name or self.b.name:
            yield Line(f"A: {self.a.name}")
            yield Line(f"B: {self.b.name}")
        if self.simulated is not None:
            yield from self.simulated.shown()
            yield Line("on the real engine", "title")
        yield from self.shown()
        if self.disturbance and not self.disturbed:
            yield Line(f"machine: {self.disturbance}")
        if self.assumed:
            yield Line(self.assumed)
        yield from map(Line, defaults_told((self.simulated or self).a, (self.simulated or self).b))
        if self.simulated is not None:
            yield self.shown_errors()
            yield from filter(None, (self.largest_error,))
            if self.ranking:
                yield shown_ranking(self.ranking)
            yield Line(ranking_verdict(self.ranking or ())[1], "headline")

    def cautions(self) -> Iterator[Line]:
        yield from super().cautions()
        if self.disturbed:
            yield Line(f"DISTURBED: {self.disturbance}; part of the difference comes from the machine", "warning")

    def shown_errors(self) -> Table:
        """Return simulated and real numbers of both sides."""
        errors = self.errors()
        known = any(row.weather_error is not None for row in errors)
        columns = [
            *_OF,
            Column("side"),
            Column("simulated", NUMBER),
            Column("real", NUMBER),
            Column("error", FIGURE, "Error of the simulated value in percent of the real one; for a share in points."),
            *((Column("speed\nknown", NUMBER), Column("its\nerror", FIGURE)) if known else ()),
        ]
        rows = []
        for row in errors:
            same = (row.weather_simulated, change_of(row.metric, row.weather_error)) if known else ()
            error = change_of(row.metric, row.error)
            rows.append((axis_of(row.metric), row.stat, row.side, row.simulated, row.real, error, *same))
        note = " (speed known: the simulator knows how slow the machine was, and nothing else about the real run)"
        return Table(columns, rows, f"simulated against real{note if known else ''}")

    @property
    def largest_error(self) -> Line | None:
        """The largest error of the simulation in percent; None if there is none."""
        worst = furthest_off(self.errors())
        if worst is None:
            return None
        stat = "" if worst.stat == "value" else f" {worst.stat}"
        simulated, real = shown_number(worst.simulated, 4), shown_number(worst.real, 4)
        values = f"{simulated} {unit_of(worst)} simulated, {real} real"
        return Line(
            f"largest error: {label_of(worst.metric)}{stat} of {worst.side}, {shown_change(worst.error)} ({values})"
        )


def defaults_told(a: Side, b: Side) -> list[str]:
    """Return lines about front doors, step times and settings left to an engine; lines of both sides come once."""
    of_a, of_b = ([*filter(None, (side.seen_by, side.step_error)), *side.defaults] for side in (a, b))
    return of_a if of_a == of_b else [f"{name}: {line}" for name, lines in (("A", of_a), ("B", of_b)) for line in lines]


def simulated_errors(
    simulated: Sequence[Row], real: Sequence[Row], same_weather: Sequence[Row] = ()
) -> list[SimulatedError]:
    """Return simulated and real numbers side by side for the rows that both have; without both numbers, no error."""
    blind, same = ({(row.metric, row.stat): row for row in rows} for rows in (simulated, same_weather))
    errors = []
    for row in real:
        key = row.metric, row.stat
        for side in "ab" if key in blind else "":
            value, predicted = getattr(row, side), getattr(blind[key], side)
            known_speed = getattr(same.get(key), side, None)
            errors.append(
                SimulatedError(
                    metric=row.metric,
                    stat=row.stat,
                    side=side.upper(),
                    simulated=predicted,
                    real=value,
                    error=_error(row.metric, predicted, value),
                    weather_simulated=known_speed,
                    weather_error=_error(row.metric, known_speed, value),
                )
            )
    return errors


def _error(metric: str, simulated: float | None, real: float | None) -> float | None:
    whole = 1.0 if metric in SHARES else real
    return 100 * (simulated - real) / whole if simulated is not None and real is not None and whole else None


def furthest_off(errors: Sequence[SimulatedError]) -> SimulatedError | None:
    """Return the largest error in percent; None if there is none."""
    relative = [row for row in errors if row.metric not in SHARES and row.error is not None]
    return max(relative, key=lambda row: abs(row.error or 0.0), default=None)


def unit_of(row: Row | SimulatedError) -> str:
    """Return the unit of a row's values."""
    return METRICS[row.metric].unit if row.metric in METRICS else "fraction"


def _with_units(table: pa.Table) -> pa.Table:
    """Return `table` with a column `unit` after the statistic."""
    units = [METRICS[name].unit if name in METRICS else "fraction" for name in table["metric"].to_pylist()]
    field = pa.field("unit", pa.string(), metadata={"definition": "of the row's values"})
    return table.add_column(2, field, pa.array(units, pa.string()))


def shown_ranking(ranked: Sequence[Ranked]) -> Table:
    """Return a table that says for each row whether the engine agrees with the simulator."""
    columns = (*_OF, Column("simulated", FIGURE), Column("real", FIGURE), Column("outcome"))
    changes = (
        [change_of(row.metric, percent) for percent in (row.simulated_percent, row.real_percent)] for row in ranked
    )
    return Table(
        columns,
        [(axis_of(row.metric), row.stat, *pair, row.outcome) for row, pair in zip(ranked, changes, strict=True)],
    )


_OUTCOMES = {
    "holds": "confirmed",
    "reversed": "reversed",
    "open": "open (the engine shows no difference)",
    "missed": "missed (only the engine shows it)",
}


def ranking_verdict(ranked: Sequence[Ranked]) -> tuple[str, str]:
    """Return `reversed`, `holds` or `open`, and a sentence about the simulated ranking on the engine."""
    counts = {name: sum(row.outcome == name for row in ranked) for name in _OUTCOMES}
    outcomes = ", ".join(f"{count} {_OUTCOMES[name]}" for name, count in counts.items() if count)
    if counts["reversed"]:
        return "reversed", f"the ranking DOES NOT HOLD on the engine: {outcomes}"
    if counts["holds"]:
        return "holds", f"the ranking holds on the engine: {outcomes}"
    if not outcomes:
        return "open", "neither the simulator nor the real engine shows a difference"
    return "open", f"the engine does not contradict the simulator: {outcomes}"


def change_of(metric: str, change: float | None) -> str:
    """Return a change of a metric in percent of A, or in points if the metric is a share."""
    return shown_change(change, unit=" points" if metric in SHARES else " %")
