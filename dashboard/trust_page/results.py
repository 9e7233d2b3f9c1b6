"""Files that `tokentwin validate external`, `front-door` and `decisions -o DIR` write for the dashboard, checked."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from tokentwin.calibration.trust import EXTRAPOLATED, Trust, least_certain, noted_trust, weakest
from tokentwin.dashboard.bundled import EXTERNAL_SAMPLE
from tokentwin.dashboard.library import find, stamp
from tokentwin.serving.answers.figures import shown_band
from tokentwin.serving.data_file import parse_json, with_present_names
from tokentwin.serving.deployments.config import parse
from tokentwin.serving.errors import UserError

EXTERNAL, CLIENTS, DECISIONS = "external.json", "clients.json", "decisions.json"
LATENCIES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "E2E"}
Column = Literal["blind", "anchored"]
Results = TypeVar("Results", bound="Result")
_COMMANDS = {"clients": "front-door"}  # the command where it differs from the name of the file


class Result(BaseModel):
    """The results of a command, or a part of them; later versions may add fields."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Target(Result):
    """A target of a figure's error, in percent of the measured value, and the error."""

    figure: str
    within_pct: float
    column: Column = "blind"
    over: str = "each"
    error_pct: float
    at: str = ""
    met: bool


class Figure(Result):
    """One figure of one published run; errors are in percent of the measured value."""

    run: str
    figure: str
    measured: float
    blind: float
    low: float
    high: float
    anchored: float | None = None
    floor_pct: float | None = None
    blind_error_pct: float
    anchored_error_pct: float | None = None
    covered: bool

    def error_pct(self, column: Column) -> float | None:
        return self.blind_error_pct if column == "blind" else self.anchored_error_pct


class Served(Result):
    """What a published run served; see `calibration/validation/external/served.py`."""

    model: str
    weights: str
    kv_cache: str
    shards: int
    closed: bool | None = None
    at_a_time: float | None = None


class Source(Result):
    """A published measurement: what ran, who published it, and the predictions.

    `served` has what each run served, by its name. It is empty in older results; their runs are like no plan.
    """

    name: str
    title: str
    source: str
    engine: str
    gpu: str
    trust: str
    why: str
    targets: list[Target] = []
    rows: list[Figure] = []
    served: dict[str, Served] = {}


class External(Result):
    """The results of rung 4: all published measurements that one run of the command predicted."""

    created: str = ""
    version: str = ""
    cases: list[Source] = Field(min_length=1)

    @property
    def targets(self) -> list[Target]:
        return [target for case in self.cases for target in case.targets]

    @property
    def rows(self) -> list[Figure]:
        return [row for case in self.cases for row in case.rows]

    def on_gpu(self, gpu: str) -> External | None:
        """Return the results of the measurements on this GPU; None if there are none."""
        cases = [case for case in self.cases if case.gpu == gpu]
        return self.model_copy(update={"cases": cases}) if cases else None


def covered(rows: Iterable[Figure]) -> int:
    """Return the number of figures that lie in their 90 % interval."""
    return sum(row.covered for row in rows)


def median_errors_pct(rows: Iterable[Figure], column: Column = "blind") -> dict[str, float]:
    """Return the median absolute error in percent of each latency (`TTFT`, `TPOT`, `E2E`) that has one."""
    errors: dict[str, list[float]] = {}
    for row in rows:
        label, error = LATENCIES.get(row.figure.partition(".")[0]), row.error_pct(column)
        if label is not None and error is not None:
            errors.setdefault(label, []).append(abs(error))
    return {label: median(errors[label]) for label in LATENCIES.values() if label in errors}


def trust(cases: Iterable[Source]) -> Trust:
    """Return the trust in predictions of several sources."""
    otherwise = "the source does not state how far to trust it"
    return weakest((noted_trust(case.trust, f"{case.name}, where {case.why}", otherwise) for case in cases), "sources")


def source_row(case: Source, column: Column) -> dict[str, object]:
    """Return a row about a source: what was run, and how far its predictions are off."""
    return {
        "run": case.name,
        **dict.fromkeys(LATENCIES.values()),
        **median_errors_pct(case.rows, column),
        "in 90 % band": 100 * covered(case.rows) / len(case.rows) if case.rows else None,
        "targets met": f"{sum(target.met for target in case.targets)} of {len(case.targets)}",
        "trust": case.trust,
        "engine": f"{case.engine} on {case.gpu}",
        "what was run": case.title,
        "source": case.source,
    }


def newest_external(runs: Path) -> External:
    """Return the newest results under `runs`, or the bundled ones. Raises UserError, one line, if they are damaged."""
    return load_external(next(iter(find(runs, EXTERNAL).values()), EXTERNAL_SAMPLE))


def load_external(directory: Path) -> External:
    """Return the results in `directory`. Raises UserError, one line, if they are missing or damaged."""
    return read_results(External, directory, EXTERNAL)


def read_results(kind: type[Results], directory: Path, file: str) -> Results:
    """Return the results that `tokentwin validate` wrote to a file of the directory.

    Raises UserError, one line, if it is missing or damaged.
    """
    return _read(kind, directory, file, stamp(directory) if directory.is_dir() else 0)


@lru_cache(maxsize=16)
def _read(kind: type[Results], directory: Path, file: str, written: int) -> Results:
    name, rung = f"{directory.name}/{file}", file.removesuffix(".json")
    try:
        data = parse_json((directory / file).read_bytes())
    except (OSError, ValueError) as error:
        remedy = f"cannot be read ({error}); run tokentwin validate {_COMMANDS.get(rung, rung)} again"
        raise UserError(rung, name, remedy) from None
    return parse(kind, with_present_names(data), where=name)


def readable_external(runs: Path) -> External | None:
    """Return the newest results as `newest_external`; None if they are damaged (which the Trust page says)."""
    with suppress(UserError):
        return newest_external(runs)
    return None


def trust_on(external: External | None, gpu: str, predicted: Trust) -> Trust:
    """Return the trust in a fleet on `gpu`: without a published run on this GPU it is at most extrapolated."""
    if external is None or external.on_gpu(gpu) is not None:
        return predicted
    return least_certain((predicted, Trust(EXTRAPOLATED, f"no published run on {gpu} was compared with predictions")))


class ClientFigure(Result):
    """One statistic as clients saw it, and as simulated; errors are in percent of what clients saw."""

    metric: str
    statistic: str
    real: float
    engine_alone: float
    simulated: float
    error_pct: float
    floor_pct: float | None = None
    in_weather: float | None = None
    in_weather_error_pct: float | None = None


class Clients(Result):
    """Rung 6: one workload as clients saw it, and as it was simulated."""

    created: str = ""
    clients: list[str] = Field([])
    front_door: str = ""
    rows: list[ClientFigure] = Field(min_length=1)

    @property
    def means(self) -> list[ClientFigure]:
        return [row for row in self.rows if row.statistic == "mean"]


def newest_clients(runs: Path) -> Clients | None:
    """Return the newest results under `runs`, None without any. Raises UserError, one line, if they are damaged."""
    directory = next(iter(find(runs, CLIENTS).values()), None)
    return None if directory is None else read_results(Clients, directory, CLIENTS)


class Rule(Result):
    """The utility of the choices of a rule; shares of the questions. The first rule is `tokentwin plan`'s."""

    questions: int
    groups: int
    utility: float
    low: float
    high: float
    broke: float
    rule: str


class Decisions(Result):
    """Rung 7: all rules on the same questions."""

    created: str = ""
    rules: list[Rule] = Field(min_length=1)

    @property
    def ours(self) -> Rule:
        """The rule of `tokentwin plan`."""
        return self.rules[0]


def newest_decisions(runs: Path) -> Decisions:
    """Return the newest results under `runs`, or the bundled ones. Raises UserError, one line, if they are damaged."""
    directory = next(iter(find(runs, DECISIONS).values()), EXTERNAL_SAMPLE)
    return read_results(Decisions, directory, DECISIONS)


def decision_rows(decisions: Decisions) -> list[dict[str, Any]]:
    """Return a row for every rule, in percent."""
    return [
        {
            "choice by": rule.rule,
            "utility (%)": 100 * rule.utility,
            "90 % interval": shown_band(100 * rule.low, 100 * rule.high),
            "broken SLOs (%)": 100 * rule.broke,
        }
        for rule in decisions.rules
    ]
