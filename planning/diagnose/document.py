"""A diagnosis as one document: its inputs, the symptoms, and the gain from lifting each constraint.

`tokentwin diagnose` prints and saves it, a job of the Run page keeps it, and `tokentwin export` reads it.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import pyarrow as pa

from tokentwin.planning.diagnose.command import compare_command
from tokentwin.serving.answers.document import Document, Number, Part, fact
from tokentwin.serving.answers.figures import shown_change, shown_share, shown_time
from tokentwin.serving.answers.report import FIGURE, SHARE, Column, Line, Table
from tokentwin.serving.metrics import label_of, metric
from tokentwin.traces.document_table import table_of

FINISHED = "finished"  # judged instead of a latency if requests are lost
RECORDING = "the recording"
OVERLOAD = "overload"  # a symptom
_SAME = 0.01  # share of a p99 up to which a loss is not noticed
LEAST = 0.1  # share of the p99, or of the lost requests; a lift with a smaller gain is no cause and not recommended
AS_IT_WAS = "simulation with all constraints"
AREAS = ("model", "kernels", "KV", "scheduler", "capacity")
NO_PARTS = "the cost model does not know this part of a step"


class Finding(NamedTuple):
    """The share that a symptom touches, the numbers that show it, and fields that override `symptoms.toml`."""

    severity: float
    evidence: str
    metric: str = ""
    proof: str = ""


class Symptom(Part):
    """Something in a run that looks wrong, with the numbers that show it."""

    name: str = fact("name of the symptom")
    lifecycle: str = fact("layer of the symptom: compute, memory or request, or two of them")
    severity: float = fact(
        "share that the symptom touches: of requests, time, latency, tokens, memory or FLOPs", "fraction"
    )
    metric: str = fact("latency in which the symptom shows")
    evidence: str = fact("numbers that show the symptom")
    proof: str = fact("measurement that would prove the cause")
    lifts: tuple[str, ...] = fact("lifts of which one must help if the symptom is a cause", default=())
    outcome: str = fact("what simulations say about the symptom; empty if no simulation tests it", default="")
    refuted: bool = fact("whether simulations show that the symptom is no cause of the judged latency", default=False)

    @classmethod
    def from_finding(cls, name: str, finding: Finding) -> Symptom:
        """Return the symptom of that `name` in `symptoms.toml`, with the numbers of `finding`."""
        own = {key: value for key, value in finding._asdict().items() if value != ""}
        return cls.model_validate({"name": name, **_catalogue()[name], **own})


@cache
def _catalogue() -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("symptoms.toml").read_text(encoding="utf-8"))


class Counterfactual(Part):
    """The run simulated again with one difference: without a constraint, or with a change."""

    name: str = fact("name of the difference that was simulated")
    cause: str = fact("cause that is to blame if the difference helps")
    lifecycle: str = fact("layer that it belongs to: compute, memory or request")
    area: str = fact("area whose part of a latency it shows: model, kernels, KV, scheduler or capacity", default="")
    kind: str = fact("`capacity` or `policy`")
    p99: dict[str, Number] = fact(
        "p99 with the difference, by latency; null if more than 1 % of the requests never finish", "ms"
    )
    bought: dict[str, Number] = fact(
        "share of the run's p99 that disappears, by latency; `finished` has the share of lost requests that finish"
    )
    skipped: str = fact("reason why the difference was not simulated; there are no numbers then", default="")
    finished: Number = fact("share of all requests that finish", "fraction", default=None)
    mends: bool | None = fact(
        "whether the run then keeps up with its arrivals, or loses no requests; null if it did so before", default=None
    )
    ideal: bool = fact(
        "whether nobody can buy the difference: it only shows the effect of the constraint", default=True
    )
    gpus: int | None = fact("number of GPUs that it needs", default=None)
    settings: dict[str, Any] = fact("settings that a change sets, as `tokentwin compare` takes them", default={})

    @property
    def called(self) -> str:
        """The `name`, marked if it is an ideal."""
        return f"{self.name} *" if self.ideal else self.name

    def gain(self, name: str) -> float:
        """Return the share `bought` of the latency `name`, or minus infinity if the remaining latency is infinite."""
        share = self.bought.get(name, 0.0)
        return -math.inf if share is None else share


class TrustSection(Part):
    """The trust in step times."""

    level: str = fact("level: validated, interpolated, extrapolated or unknown")
    reason: str = fact("reason of the level")


class DiagnosisDocument(Document):
    """The result of a diagnosis. Without a cost model it has only symptoms."""

    what: ClassVar[str] = "a diagnosis"
    where: ClassVar[str] = "diagnosis"

    steps: bool = fact("whether the recording has steps, so that compute and memory were examined", default=True)
    verdict: str = fact("cause that was proved, and the change that mends it, in a sentence")
    kind: str | None = fact("`capacity` or `policy`; null if there is no problem", default=None)
    cause: str | None = fact("counterfactual that is most to blame", default=None)
    metric: str = fact("latency whose p99 is explained; `finished` if lost requests are explained")
    recorded_p99: dict[str, Number] = fact("p99 by latency in the recording", "ms")
    simulated_p99: dict[str, Number] = fact("p99 by latency in the run simulated as it was", "ms")
    recorded_finished: Number = fact("share of the requests that finish in the recording", "fraction", default=None)
    simulated_finished: Number = fact("share of the requests that finish in the simulation", "fraction", default=None)
    twin_error: Number = fact("error of the judged value in the simulation, relative to the recording")
    warning: str | None = fact(
        "reason why counterfactuals may be about another run than the recorded one", default=None
    )
    trust: TrustSection | None = fact("trust in the cost model's step times", default=None)
    arrival_rate: Number = fact("arrivals of an overloaded run", "requests/s", default=None)
    served_rate: Number = fact("requests that an overloaded run can serve", "requests/s", default=None)
    bounds: dict[str, float] = fact("bounds of the p99s by latency", "ms", default={})
    requests: int = fact("number of recorded requests", default=0)
    gpus: int = fact("number of GPUs of the run simulated as it was", default=0)
    symptoms: tuple[Symptom, ...] = fact(
        "the symptoms, the largest share first; long latencies and idle devices come last"
    )
    counterfactuals: tuple[Counterfactual, ...] = fact("the counterfactuals, the most likely cause first")
    changes: tuple[Counterfactual, ...] = fact("changes that can be bought or set, the best first", default=())
    run: str = fact("directory of the recording", default="")
    calibration: str | None = fact("directory of the calibration that timed the simulated runs", default=None)
    gpu: str | None = fact("GPU whose kernel tables timed the simulated runs, if no calibration did", default=None)
    both: dict[str, Any] = fact("arguments of `compare` that describe the run beside its deployment", default={})
    scaling: Number = fact(
        "throughput of twice the GPUs over twice the present throughput, if all requests arrive at once",
        "fraction",
        default=None,
    )
    version: str = fact("version of tokentwin", default="")
    inputs: dict[str, Any] = fact('`{"command": ...}`, or the inputs of the page', default={})

    def command(self, change: Counterfactual, run: str | None = None) -> str:
        """Return the command that shows what `change` gains, request by request.

        `run` is the present directory of the recording.
        """
        return compare_command(run or self.run, self.calibration, self.gpu, self.both, change.settings)

    @property
    def best(self) -> Counterfactual | None:
        """The recommended change: it gains enough, or saves GPUs and makes no latency worse; None if there is none."""

        def spares(change: Counterfactual) -> bool:
            return (change.gpus or 0) < self.gpus and min(map(change.gain, self.simulated_p99)) >= -_SAME

        first = [change for change in self.changes[:1] if change.gain(self.metric) >= LEAST]
        return next(iter([*first, *filter(spares, self.changes)]), None)

    def finding(self, bounds: Mapping[str, float] | None = None) -> str:
        """Return the verdict, and what the recommended change does not cure.

        `bounds` are bounds of p99s in milliseconds, by default those of the diagnosis.
        """
        return "; ".join(filter(None, (self.verdict, self.remains(self.bounds if bounds is None else bounds))))

    def remains(self, bounds: Mapping[str, float] = MappingProxyType({})) -> str:
        """Return what the recommended change does not cure, in a clause; empty without such a change."""
        best = self.best
        if best is None:
            return ""
        if self.sheds:
            lost = 1 - (best.finished or 0.0)
            return f"{shown_share(lost, 1)} of the requests would still not finish" if lost else ""
        left = {name: math.inf if best.p99.get(name) is None else best.p99[name] or 0.0 for name in self.simulated_p99}
        over = [name for name, bound in bounds.items() if left.get(name, 0.0) > bound]
        unknown = [label_of(name) for name in bounds if name not in left]
        also = f"; not simulated: {', '.join(unknown)}" if unknown else ""
        if len(bounds) > len(unknown) and not over:
            return f"every {'simulated ' if unknown else ''}p99 is then within its SLO{also}"
        named = [f"{label_of(name)} {shown_time(left[name])}" for name in over or left]
        piles_up = "requests still pile up; " if best.mends is False else ""
        return f"{piles_up}{'still broken:' if over else 'the p99s are then'} {', '.join(named)}{also}"

    @property
    def sheds(self) -> bool:
        """True if lost requests are explained; p99s then cover the requests that finish."""
        return self.metric == FINISHED

    @property
    def blamed(self) -> Counterfactual | None:
        """The counterfactual of the `cause`, with its figures."""
        return next((tried for tried in self.tried if tried.name == self.cause), None)

    @property
    def tried(self) -> tuple[Counterfactual, ...]:
        """The counterfactuals that were simulated."""
        return tuple(tried for tried in self.counterfactuals if not tried.skipped)

    @property
    def with_changes(self) -> tuple[Counterfactual, ...]:
        """The simulated counterfactuals, and the changes that are not among them."""
        names = {tried.name for tried in self.tried}
        return (*self.tried, *(change for change in self.changes if change.name not in names))

    def p99(self, time_ms: float | None) -> str:
        """Return a p99 in words. None means infinite if the p99 covers all requests, else that there is no p99."""
        return shown_time(math.inf if time_ms is None and not self.sheds else time_ms)

    def changed_p99(self, tried: Counterfactual, latency: str) -> str:
        """Return the remaining p99 and its change, in words."""
        bought = tried.bought.get(latency)
        return f"{self.p99(tried.p99.get(latency))} ({shown_change(None if bought is None else -100 * bought, 0)})"

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the tables; the table of counterfactuals comes first."""
        return ("counterfactuals", "symptoms") if self.counterfactuals else ("symptoms",)

    def table(self, name: str) -> pa.Table:
        """Return `symptoms`, or `counterfactuals` with each latency's remaining p99 and the share that disappears."""
        if name == "symptoms":
            return table_of(Symptom, self.symptoms)
        table = table_of(Counterfactual, self.counterfactuals)
        for latency in self.simulated_p99:
            left = {"unit": "ms", "definition": f"99th percentile of {label_of(latency)}"}
            gone = {"unit": "fraction", "definition": "share of the run's p99 that disappears"}
            columns = (("p99", latency.replace("_ms", "_p99_ms"), left), ("bought", f"{latency}_bought", gone))
            for source, column, about in columns:
                values = [getattr(tried, source).get(latency) for tried in self.counterfactuals]
                table = table.append_column(
                    pa.field(column, pa.float64(), metadata=about), pa.array(values, pa.float64())
                )
        return table

    def report(self) -> Iterator[Line | Table]:
        yield Line(self.finding(), "headline")
        if self.best:
            yield Line(self.command(self.best), "command")
        if self.warning:
            yield Line(self.warning, "warning")
        yield from self.shown_symptoms()
        if self.counterfactuals:
            yield from self.shown_lifts()
            yield from self.shown_areas()
        else:
            yield Line("give -c or --gpu to simulate the run with each constraint lifted", "note")

    def shown_symptoms(self) -> Iterator[Line | Table]:
        """Yield the symptoms that may be causes, those that are none, and a note if steps were not examined."""
        likely = [symptom for symptom in self.symptoms if not symptom.refuted]
        if likely:
            columns = tuple(map(Column, ("symptom", "lifecycle", "evidence", "how to test it")))
            simulated = "simulated: {}".format
            rows = [(s.name, s.lifecycle, s.evidence, simulated(s.outcome) if s.outcome else s.proof) for s in likely]
            yield Table(columns, rows, sentences=True)
        if refuted := [f"{symptom.name} ({symptom.outcome})" for symptom in self.symptoms if symptom.refuted]:
            yield Line(f"seen, but no cause: {', '.join(refuted)}", "note")
        if not self.steps:
            yield Line("the recording has no steps, so compute and memory were not examined", "note")

    def shown_areas(self) -> Iterator[Line]:
        """Yield the largest gain in each area, in one line."""
        largest = []
        for area in AREAS:
            lifts = [lift for lift in self.counterfactuals if lift.area == area]
            best = max((lift for lift in lifts if not lift.skipped), key=lambda c: c.gain(self.metric), default=None)
            gain = max(best.gain(self.metric), 0.0) if best else 0.0
            if best and (gain >= LEAST or all(lift.skipped != NO_PARTS for lift in lifts)):
                largest.append((gain, f"{area} {shown_share(gain)}" + f" ({best.name})" * (gain > 0)))
            elif lifts:
                largest.append((-1.0, f"{area} not known"))
        texts = [text for _, text in sorted(largest, key=lambda entry: -entry[0])]
        what = "lost requests" if self.sheds else f"p99 of {metric(self.metric).label}"
        if texts:
            yield Line(f"part of the {what} by area: {', '.join(texts)}", "note")

    def shown_lifts(self) -> Iterator[Line | Table]:
        """Yield the latencies with each constraint lifted and with each change, and the lifts that were not tried."""

        def row(name: str, kind: str, finished: float | None, p99s: Iterable[str]) -> list[Any]:
            return [name, kind, *([finished] if self.sheds else []), *p99s]

        recorded = (self.p99(self.recorded_p99.get(name)) for name in self.simulated_p99)
        simulated = map(self.p99, self.simulated_p99.values())
        rows = [
            row(RECORDING, "", self.recorded_finished, recorded),
            row(AS_IT_WAS, "", self.simulated_finished, simulated),
        ]
        lifted = self.with_changes
        effects = {t.name: max(abs(t.gain(name)) for name in (*self.simulated_p99, self.metric)) for t in lifted}
        for tried in (tried for tried in lifted if effects[tried.name] >= _SAME):
            p99s = (self.changed_p99(tried, name) for name in self.simulated_p99)
            rows.append(row(tried.called, tried.kind, tried.finished, p99s))
        finish = [Column("finish", SHARE)] if self.sheds else []
        latencies = (Column(f"{metric(name).label} p99", FIGURE) for name in self.simulated_p99)
        columns = (Column("with"), Column("kind"), *finish, *latencies)
        scope = "; latencies cover only requests that finish" if self.sheds else ""
        yield Table(columns, rows, f"effect of lifting one constraint, or of one change{scope}")
        yield Line("* an ideal that nobody can buy: it shows the effect of the constraint", "note")
        for why, names in (
            ("no effect", [name for name, effect in effects.items() if effect < _SAME]),
            ("the cost model does not separate", [t.name for t in self.counterfactuals if t.skipped == NO_PARTS]),
            ("do not apply", [t.name for t in self.counterfactuals if t.skipped not in ("", NO_PARTS)]),
        ):
            if names:
                yield Line(f"{why}: {', '.join(names)}", "note")
