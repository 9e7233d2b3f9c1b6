"""A comparison as one document: its claims, its curves, what ran, and its inputs.

`tokentwin compare` prints and saves it, a job of the Policy lab keeps it, and `tokentwin export` reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import pyarrow as pa
from pydantic import ConfigDict
from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from serving.document import Document, Number, Part, fact
from serving.figures import counted, shown_band, shown_change, shown_number
from serving.metrics import METRICS, axis_of, label_of
from traces.document_table import table_of

SHARES = ("slo_attainment", "finished")  # their differences are points: 29 % to 52 % is +23 points, not +76 %
_METRIC = "a metric of the glossary, or `finished`: the share of the requests that finish"
_STAT = "its statistic; `value` where it has but one"


class Units(Part):
    """The resampled units."""

    of: str = fact("kind of unit: `runs`, or `blocks` of consecutive arrivals")
    count: int = fact("number of units")
    carry_over: bool = fact("whether blocks go together more than the intervals allow for")


class Row(Part):
    """A statistic of both sides."""

    metric: str = fact(_METRIC)
    stat: str = fact(_STAT)
    a: Number = fact("value on side A", "the row's")
    b: Number = fact("value on side B", "the row's")
    low: Number = fact("lower end of the 95 % interval of B - A, which holds for all rows together", "the row's")
    high: Number = fact("upper end of the same interval", "the row's")
    percent: Number = fact("B - A in percent of A; of a share in percentage points", "%")
    better: str = fact("A or B where a difference can be claimed, else empty")


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
    """One side of a comparison: a simulated deployment, or one that some clock recorded."""

    name: str = fact("name of the side in the question", default="")
    clock: str = fact("clock of recordings", default="")
    runs: int | None = fact("number of recordings; null where the side was simulated", default=None)
    level: str = fact("how far its step times can be trusted", default="")
    reason: str = fact("reason of the level", default="")
    calibration: str = fact("id of the calibration that timed the steps; empty of a recording", default="")
    deployment: RanDeployment = fact("the deployment of one replica")
    replicas: int | None = fact("engines of a simulated side", default=None)
    router: str | None = fact("router of a simulated side", default=None)
    defaults: tuple[str, ...] = fact(
        "settings that a simulated side leaves to its engine, a line for each pool", default=()
    )


class Ranked(Part):
    """A row for which the simulator or the engine claims a difference, and whether they agree."""

    metric: str = fact(_METRIC)
    stat: str = fact(_STAT)
    simulated_percent: Number = fact("B - A on the simulator, in percent of A; of a share in percentage points", "%")
    real_percent: Number = fact("B - A on the real engine, in percent of A; of a share in percentage points", "%")
    outcome: str = fact("holds, open (the engine claims nothing), reversed, missed (only the engine claims)")


class SimulatedError(Part):
    """A simulated number beside the real one."""

    metric: str = fact(_METRIC)
    stat: str = fact(_STAT)
    side: str = fact("A or B")
    simulated: Number = fact("value in the simulator", "the row's")
    real: Number = fact("value on the real engine", "the row's")
    error: Number = fact("simulated against real, in percent of real; of a share in percentage points", "%")
    weather_simulated: Number = fact(
        "value in the simulator, in the weather of the real runs", "the row's", default=None
    )
    weather_error: Number = fact("error of that value against the real one", "%", default=None)


class Compared(Part):
    """A comparison of two sides on the same requests."""

    verdict: str = fact("claim about the difference, in a sentence")
    difference: bool = fact("whether any difference can be claimed", default=False)
    winner: str = fact("A or B where that side is better on the whole, else empty", default="")
    requests: int = fact("number of requests compared, in all runs of a side", default=0)
    runs: int = fact("number of runs of each side", default=1)
    units: Units = fact("units that were resampled")
    rows: tuple[Row, ...] = fact("every number of both sides with its difference", min_length=1)
    threshold: float = fact("relative change of a request's latency that counts as a gain or a loss", "fraction")
    tallies: tuple[Tally, ...] = fact("winners and losers, by group")
    cdfs: Cdfs = fact("distributions of latency")
    tenants: tuple[Tenant, ...] = fact("each tenant's share of the requests and of what is served; none of one tenant")
    a: Side = fact("deployment or recordings of side A")
    b: Side = fact("deployment or recordings of side B")


class ComparisonDocument(Compared, Document):
    """The answer to a comparison; real runs may have the same runs simulated beside them."""

    what: ClassVar[str] = "a comparison"
    where: ClassVar[str] = "comparison"

    disturbed: bool = fact("whether the machine was disturbed while the real runs were recorded", default=False)
    disturbance: str = fact("description of the disturbance; empty of simulated runs", default="")
    simulated: Compared | None = fact("the real runs, simulated", default=None)
    same_weather: Compared | None = fact("the real runs, simulated in the weather of each", default=None)
    ranking: tuple[Ranked, ...] | None = fact(
        "differences that simulator or engine claims, and whether the two agree", default=None
    )
    version: str = fact("version of tokentwin", default="")
    inputs: dict[str, Any] = fact('`{"command": ...}`, or the inputs of the page', default={})

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the tables; three of them exist only if real runs were simulated, too."""
        return ("rows", "tallies", *(("simulated", "errors", "outcomes") if self.simulated else ()))

    def table(self, name: str) -> pa.Table:
        """Return one of the tables.

        Args:
            rows: every number of both sides with its difference
            tallies: winners and losers, by group
            simulated: like `rows`, for the simulated runs beside real ones
            errors: every simulated number beside the real one, by side
            outcomes: whether the engine confirms what the simulator claims
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
        """Return the document with names for its sides."""
        return self.model_copy(
            update={key: getattr(self, key).model_copy(update={"name": name}) for key, name in (("a", a), ("b", b))}
        )

    def errors(self) -> list[SimulatedError]:
        """Return the error of each simulated number against the real one; empty if nothing was simulated."""
        same = self.same_weather.rows if self.same_weather else ()
        return simulated_errors(self.simulated.rows, self.rows, same) if self.simulated else []

    def report(self) -> Iterator[RenderableType]:
        if self.a.name or self.b.name:
            yield Text(f"A: {self.a.name}\nB: {self.b.name}")
        if self.simulated is not None:
            yield from compared_report(self.simulated)
            yield Text("\non the real engine")
        yield from compared_report(self)
        if self.disturbed:
            yield Text.assemble(("DISTURBED", "bold yellow"), f": {self.disturbance}; take real times with care")
        elif self.disturbance:
            yield Text(f"weather: {self.disturbance}")
        yield from map(Text, defaults_told((self.simulated or self).a, (self.simulated or self).b))
        if self.simulated is not None:
            yield from _errors(self.errors())
            yield from ranking_report(self.ranking or ())


def defaults_told(a: Side, b: Side) -> list[str]:
    """Return the lines about settings left to an engine, once if they are the same on both sides."""
    if a.defaults == b.defaults:
        return list(a.defaults)
    return [f"{name}: {line}" for name, side in (("A", a), ("B", b)) for line in side.defaults]


def simulated_errors(
    simulated: Sequence[Row], real: Sequence[Row], same_weather: Sequence[Row] = ()
) -> list[SimulatedError]:
    """Return simulated and real numbers side by side, for the rows that both have. A missing number has no error."""
    blind, same = ({(row.metric, row.stat): row for row in rows} for rows in (simulated, same_weather))
    errors = []
    for row in real:
        key = row.metric, row.stat
        for side in "ab" if key in blind else "":
            value, predicted = getattr(row, side), getattr(blind[key], side)
            in_weather = getattr(same.get(key), side, None)
            errors.append(
                SimulatedError(
                    metric=row.metric,
                    stat=row.stat,
                    side=side.upper(),
                    simulated=predicted,
                    real=value,
                    error=_error(row.metric, predicted, value),
                    weather_simulated=in_weather,
                    weather_error=_error(row.metric, in_weather, value),
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


_WRAPS, _WHOLE = {"min_width": 10}, {"no_wrap": True}


def compared_report(compared: Compared) -> Iterator[RenderableType]:
    """Yield the report of a comparison of two sides."""
    rows = _table({"metric": _WRAPS, "stat": _WHOLE}, ("A", "B", "B - A", "change"))
    rows.add_column("95 % interval", justify="right", min_width=9)
    rows.add_column("better", no_wrap=True)
    for row in compared.rows:
        change = None if row.a is None or row.b is None else row.b - row.a
        numbers = (*(shown_number(value, 4) for value in (row.a, row.b, change)), change_of(row.metric, row.percent))
        rows.add_row(axis_of(row.metric), row.stat, *numbers, shown_band(row.low, row.high, 4), row.better)
    yield rows
    group = {"min_width": 6, "overflow": "fold"}
    tallies = _table({"metric": _WHOLE, "of": group}, ("B gains", "B loses", "same", "mean A", "mean B"))
    for tally in compared.tallies:
        members = tally.group if tally.by == "all" else f"{tally.by} {tally.group or '(none)'}"
        counts = (str(n) for n in (tally.gain, tally.lose, tally.same))
        tallies.add_row(tally.metric, members, *counts, shown_number(tally.mean_a, 4), shown_number(tally.mean_b, 4))
    yield Text()
    yield tallies
    units = compared.units
    unit = counted(units.count, units.of.removesuffix("s")) + (" of arrivals" if units.of == "blocks" else "")
    lost = any(row.metric == "finished" for row in compared.rows)
    means = " Mean A and mean B cover the requests that finish on both sides." if lost else ""
    summary = (
        f"\n{counted(compared.requests, 'request')}, resampled by {unit}; the intervals hold for all rows together. "
        f"A request gains or loses if its latency changes by {100 * compared.threshold:g} % or more.{means}"
    )
    yield Text(summary, style="dim")
    if units.carry_over:
        warning = "queues last longer than blocks, so intervals are wide; compare longer runs, or several seeds"
        yield Text(warning, style="yellow")
    yield Text(compared.verdict, style="bold")


def _errors(errors: Sequence[SimulatedError]) -> Iterator[RenderableType]:
    """Yield simulated and real numbers of both sides, and the largest error."""
    weather = any(row.weather_error is not None for row in errors)
    numbers = ("simulated", "real", "error", *(("in its\nweather", "error") if weather else ()))
    table = _table({"metric": _WRAPS, "stat": _WHOLE, "side": _WHOLE}, numbers)
    for row in errors:
        shown = [shown_number(row.simulated, 4), shown_number(row.real, 4), change_of(row.metric, row.error)]
        shown += [shown_number(row.weather_simulated, 4), change_of(row.metric, row.weather_error)] if weather else []
        table.add_row(axis_of(row.metric), row.stat, row.side, *shown)
    yield Text(
        "\nsimulated against real; in its weather: told how slow the machine was, and nothing else of the real run"
    )
    yield table
    worst = furthest_off(errors)
    if worst is not None:
        stat = "" if worst.stat == "value" else f" {worst.stat}"
        largest = f": {label_of(worst.metric)}{stat} of {worst.side}, {shown_change(worst.error)}"
        yield Text.assemble(("largest error", "bold"), largest)


def ranking_report(ranked: Sequence[Ranked]) -> Iterator[RenderableType]:
    """Yield for each row whether the engine agrees, then a summary in one sentence."""
    if not ranked:
        yield Text("neither the simulator nor the real engine shows a difference", style="bold")
        return
    table = Table("metric", "stat", "simulated", "real", "outcome")
    for row in ranked:
        changes = (change_of(row.metric, change) for change in (row.simulated_percent, row.real_percent))
        table.add_row(row.metric, row.stat, *changes, row.outcome)
    yield table
    counts = {name: sum(row.outcome == name for row in ranked) for name in ("holds", "open", "reversed", "missed")}
    counted = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    verdict = "the ranking DOES NOT HOLD on the engine" if counts["reversed"] else "the engine does not contradict it"
    yield Text.assemble((verdict, "bold"), f": {counted}")


def _table(names: Mapping[str, Mapping[str, Any]], numbers: Sequence[str]) -> Table:
    """Return a table with columns of names, laid out as given, then columns of numbers, which are never cut."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    for name, layout in names.items():
        table.add_column(name, **layout)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def change_of(metric: str, change: float | None) -> str:
    """Return a change of a metric in percent of A, or in points if the metric is a share."""
    return shown_change(change, unit=" points" if metric in SHARES else " %")
