"""A validation report, which `tokentwin validate` writes as `report.json` and `step_residuals.parquet`.

All code that shows or exports a report reads it with this module, which checks it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from tokentwin.serving.answers.document import Document, Number, Part, fact
from tokentwin.serving.answers.figures import shown_number, shown_share
from tokentwin.serving.answers.report import BAND, CHANGE, COUNT, METRIC, NUMBER, PERCENT, Column, Line, Table
from tokentwin.serving.data_file import parse_json
from tokentwin.serving.deployments.config import parse
from tokentwin.serving.errors import UserError
from tokentwin.traces.document_table import table_of

REPORT = "report.json"
RESIDUALS = "step_residuals.parquet"
_RESIDUAL_COLUMNS = ["regime", "measured_ns", "predicted_ns"]
_MOST_NOISE_PCT = 50.0  # real runs that differ by more cannot be compared with a simulated run


class Replay(Part):
    """Rung 1: the decisions that the simulator made identically at the recorded times."""

    steps: int = fact("recorded steps")
    identical: int = fact("steps that were decided identically")
    requests: int = fact("recorded requests", default=0)
    identical_requests: int | None = fact("requests that were decided identically", default=None)
    routes: int = fact("requests that the router of several engines sent to an engine", default=0)
    identical_routes: int = fact("requests that were routed identically", default=0)
    first_difference: str | None = fact("the first step, request or route that differs", default=None)

    @property
    def exact(self) -> bool:
        """True if all decisions are identical."""
        return self.first_difference is None


class Regime(Part):
    """Rung 2: the cost model's error on held-out steps of one regime."""

    steps: int = fact("held-out steps")
    median_error_pct: Number = fact("median absolute error", "%", default=None)
    p95_error_pct: Number = fact("95th percentile of the absolute error", "%", default=None)
    bias_pct: Number = fact("mean signed error", "%", default=None)
    quantiles_pct: tuple[Number, ...] = fact("signed errors at 5, 25, 50, 75 and 95 %", "%", default=())


class StepRung(Part):
    """Rung 2: by regime, errors of wall time, and of the engine thread's CPU time at the machine's measured speed."""

    regimes: dict[str, Regime] = fact("errors of wall-clock step time, by regime", default={})
    same_weather: dict[str, Regime] = fact(
        "errors of CPU time with the machine's speed known, by regime; empty if the speed is not known", default={}
    )


class DeviceLoad(Part):
    """The distribution of an MoE model's tokens, if a number of devices shared its experts."""

    devices: int = fact("devices that share a layer's experts evenly")
    imbalance: Number = fact(
        "measured tokens on the busiest device over the mean of all devices: a value for `expert_imbalance`"
    )
    imbalance_random: Number = fact(
        "the same ratio if tokens chose evenly and independently: `expert_imbalance: random`"
    )


class ExpertBalance(Part):
    """The balance of an MoE model's experts in the real runs, compared with the cost model's assumption."""

    steps: int = fact("recorded steps")
    experts: int = fact("experts of a layer")
    topk: int = fact("experts of each token in a layer")
    hit: Number = fact("mean number of experts of a layer that a step reads")
    hit_even: Number = fact("the same number if tokens chose evenly and independently")
    devices: tuple[DeviceLoad, ...] = fact("loads by number of devices", default=())
    busiest: Number = fact(
        "tokens of the busiest expert over the mean of all experts, over all steps and layers", default=None
    )


class RunFigures(Part):
    """One statistic of one metric: its simulated and real values, errors, floors and bands."""

    metric: str = fact("a metric of the glossary")
    stat: str = fact("statistic of the metric; `value` if the metric has only one")
    real: Number = fact("value on the real engine, mean of the repeats", "the metric's", default=None)
    simulated: Number = fact("value in the simulator", "the metric's", default=None)
    error_pct: Number = fact("error of the simulated value against the real value", "%", default=None)
    floor_pct: Number = fact("largest difference between repeats of the real run", "%", default=None)
    low: Number = fact("lower end of the simulated 90 % band", "the metric's", default=None)
    high: Number = fact("upper end of the simulated 90 % band", "the metric's", default=None)
    weather_simulated: Number = fact(
        "mean simulated value with the machine's speed of each real run known", "the metric's", default=None
    )
    weather_error_pct: Number = fact("error of this value against the real value", "%", default=None)
    weather_floor_pct: Number = fact(
        "largest difference between repeats, apart from differences of the machine's speed", "%", default=None
    )
    weather_low: Number = fact(
        "lower end of the 90 % band with the machine's speed known", "the metric's", default=None
    )
    weather_high: Number = fact(
        "upper end of the 90 % band with the machine's speed known", "the metric's", default=None
    )


class RunRow(RunFigures):
    """Rung 3: a simulated and a real statistic, with the band of rung 5."""

    @property
    def noisy(self) -> bool:
        """True if repeats of the real run differ too much for any comparison."""
        return self.floor_pct is not None and abs(self.floor_pct) > _MOST_NOISE_PCT

    @property
    def covered(self) -> bool | None:
        """True if the band contains the real value; None without a band, or if the statistic is noisy."""
        if self.real is None or self.low is None or self.high is None or self.noisy:
            return None
        return self.low <= self.real <= self.high

    @property
    def within_floor(self) -> bool | None:
        """True if the error is within the difference between repeats; None without repeats or if noisy."""
        if self.error_pct is None or self.floor_pct is None or self.noisy:
            return None
        return abs(self.error_pct) <= abs(self.floor_pct)

    @property
    def at_known_speed(self) -> RunRow | None:
        """This row for the simulation that knew the machine's speed; None without such a simulation."""
        if self.weather_error_pct is None:
            return None
        return RunRow(
            metric=self.metric,
            stat=self.stat,
            real=self.real,
            simulated=self.weather_simulated,
            error_pct=self.weather_error_pct,
            floor_pct=self.weather_floor_pct,
            low=self.weather_low,
            high=self.weather_high,
        )


class RunRung(Part):
    """Rungs 3 and 5: statistics of the run, and their bands."""

    rows: tuple[RunRow, ...] = fact("by metric and statistic", default=())
    covered: Number = fact("share of the real numbers that lie in their band", "fraction", default=None)
    weather_covered: Number = fact("the same share with the machine's speed known", "fraction", default=None)


class Rungs(Part):
    """The rungs of the validation ladder; a rung that was not computed is null."""

    replay: Replay | None = fact("rung 1, decisions", default=None)
    step: StepRung | None = fact("rung 2, step times", default=None)
    run: RunRung | None = fact("rungs 3 and 5, the run", default=None)
    experts: ExpertBalance | None = fact("experts of a mixture-of-experts model", default=None)


class Recordings(Part):
    """The paths of the recordings, relative to the report."""

    real: tuple[str, ...] = fact("recordings of the real engine", default=())
    simulated: str | None = fact("the simulated run", default=None)


class ValidationReport(Document):
    """The report of a validation."""

    what: ClassVar[str] = "a validation report"
    where: ClassVar[str] = REPORT

    verdict: str = fact("verdict in a sentence")
    created: str = fact("time of the validation, as ISO 8601", default="")
    disturbed: bool = fact("whether the machine was disturbed while the real runs were recorded", default=False)
    disturbance: str = fact("description of the disturbance", default="")
    hardware: dict[str, Any] = fact("the machine of the real runs", default={})
    workload: str = fact("name of the workload", default="")
    calibration: str = fact("id of the calibration that timed the steps", default="")
    extrapolated_share: Number = fact(
        "share of the simulated steps that lie outside the measured steps", "fraction", default=None
    )
    rungs: Rungs = fact("the ladder", default=Rungs())
    recordings: Recordings = fact("paths of the runs", default=Recordings())

    @property
    def rows(self) -> tuple[RunRow, ...]:
        """The rows of rung 3."""
        return self.rungs.run.rows if self.rungs.run else ()

    @property
    def known_speed_rows(self) -> tuple[RunRow, ...]:
        """The rows for the simulation that knew the machine's speed; empty without such a simulation."""
        return tuple(same for row in self.rows if (same := row.at_known_speed))

    def worst_error_pct(self) -> float:
        """Return the largest absolute error of any statistic of the run in percent; 0 if no error is known."""
        return max((abs(row.error_pct) for row in self.rows if row.error_pct is not None), default=0.0)

    @property
    def tables(self) -> tuple[str, ...]:
        return ("rows",) if self.rows else ()

    def table(self, name: str) -> pa.Table:
        """Return the table `rows`: rung 3, with the bands of rung 5."""
        rows = self.rows
        return table_of(_Row, ({**dict(r), "covered": r.covered, "within_floor": r.within_floor} for r in rows))

    def report(self) -> Iterator[Line | Table]:
        """Yield the computed rungs and the verdict."""
        replay, steps, run = self.rungs.replay, self.rungs.step, self.rungs.run
        if replay is not None:
            yield from map(Line, _decisions(replay))
        if steps is not None:
            yield _steps(steps.regimes, "rung 2, step time")
            if steps.same_weather:
                yield _steps(steps.same_weather, "rung 2, CPU time of the steps, with the machine's speed known")
        if self.rungs.experts is not None:
            yield from map(Line, _balance(self.rungs.experts))
        if run is not None:
            requests = replay.requests // max(len(self.recordings.real), 1) if replay is not None else 0
            yield self.figures(f"rung 3, the run{f' of {requests} requests' if requests else ''}")
            if self.known_speed_rows:
                yield Line("speed known: the simulator knows how slow the machine was. blind: it does not", "note")
            if run.covered is not None:
                covered = f"{shown_share(run.covered)} of the real numbers lie in their 90 % band"
                if run.weather_covered is not None:
                    covered += f"; {shown_share(run.weather_covered)} with the machine's speed known"
                yield Line(f"rung 5, bands: {covered}")
        if self.extrapolated_share:
            outside = shown_share(self.extrapolated_share, 1)
            yield Line(f"extrapolated: {outside} of the simulated steps lie outside the measured steps")
        if self.disturbed:
            yield Line(f"DISTURBED: {self.disturbance}; take these errors with care", "warning")
        elif self.disturbance:
            yield Line(f"machine: {self.disturbance}")
        yield Line(self.verdict, "headline")

    def figures(self, title: str = "") -> Table:
        """Return the table of rung 3: real and simulated values, blind and (if it is known) at the machine's speed."""
        columns = [
            Column("metric", METRIC),
            Column("stat"),
            Column("real", NUMBER),
            Column("simulated", NUMBER, spare=1),
            Column("blind", CHANGE, "Error of the simulation."),
            Column("noise", PERCENT, "Largest difference between repeats of the same real run."),
            *(
                (
                    Column("simulated\nwith it", NUMBER, "Simulated with the machine's speed known.", spare=1),
                    Column("speed\nknown", CHANGE, "Error with the machine's speed known."),
                    Column("its noise", PERCENT, "Noise apart from differences of the machine's speed."),
                )
                if self.known_speed_rows
                else ()
            ),
            Column("90 % band", BAND, "90 % band of the blind simulation."),
        ]
        rows = []
        for row in self.rows:
            blind = (row.metric, row.stat, row.real, row.simulated, row.error_pct, row.floor_pct)
            same = (
                (row.weather_simulated, row.weather_error_pct, row.weather_floor_pct) if self.known_speed_rows else ()
            )
            rows.append((*blind, *same, (row.low, row.high)))
        outside = {(at, len(columns) - 1) for at, row in enumerate(self.rows) if row.covered is False}
        return Table(columns, rows, title, outside)


class _Row(RunFigures):
    """A row of the table `rows`."""

    covered: bool | None = fact("whether the band contains the real number")
    within_floor: bool | None = fact("whether the error is no larger than the floor")


def load_report(directory: Path) -> ValidationReport:
    """Read the report in `directory`; raise a one-line UserError if it is missing or damaged."""
    name = f"{directory.name}/{REPORT}"
    try:
        data = parse_json((directory / REPORT).read_bytes())
    except OSError as error:
        raise UserError("report", name, f"cannot be read ({error}); run tokentwin validate again") from None
    except ValueError as error:
        raise UserError("report", name, f"{error}; run tokentwin validate again") from None
    return parse(ValidationReport, data, where=name)


def load_residuals(directory: Path, whole: bool = False) -> pa.Table | None:
    """Return regime, measured time and predicted time of each held-out step, or all columns if `whole` is True.

    The result is None if the report has no residuals.
    """
    path = directory / RESIDUALS
    if not path.is_file():
        return None
    try:
        return pq.read_table(path, columns=None if whole else _RESIDUAL_COLUMNS)
    except (pa.ArrowException, OSError) as error:
        name = f"{directory.name}/{RESIDUALS}"
        raise UserError("report", name, f"is damaged ({error}); run tokentwin validate again") from None


def resolve(directory: Path, recording: str) -> Path:
    """Return the path of a recording named in the report, relative to the report or else to the working directory."""
    beside = directory / recording
    return beside if beside.exists() else Path(recording)


def _decisions(replay: Replay) -> Iterator[str]:
    requests = ""
    if replay.identical_requests is not None:
        requests = f", requests {replay.identical_requests}/{replay.requests}"
    if replay.routes:
        requests += f", routes {replay.identical_routes}/{replay.routes}"
    yield f"rung 1, decisions: steps {replay.identical}/{replay.steps}{requests} identical"
    if replay.first_difference:
        yield f"  first difference: {replay.first_difference}"


def _balance(experts: ExpertBalance) -> Iterator[str]:
    yield (
        f"experts: a step reads {shown_number(experts.hit)} of the {experts.experts} experts of a layer; "
        f"{shown_number(experts.hit_even)} if its tokens chose evenly"
    )
    if experts.busiest is not None:
        yield f"  busiest expert over the mean expert, over all steps: {shown_number(experts.busiest)}"
    for load in experts.devices:
        yield (
            f"  busiest of {load.devices} devices over the mean device: {shown_number(load.imbalance)}; "
            f"{shown_number(load.imbalance_random)} by chance"
        )


def _steps(regimes: dict[str, Regime], title: str) -> Table:
    columns = (
        Column("regime"),
        Column("steps", COUNT),
        Column("median error", PERCENT),
        Column("p95 error", PERCENT),
        Column("bias", CHANGE),
    )
    rows = [(name, r.steps, r.median_error_pct, r.p95_error_pct, r.bias_pct) for name, r in regimes.items()]
    return Table(columns, rows, title)
