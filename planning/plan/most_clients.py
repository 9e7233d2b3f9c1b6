"""The largest number of clients whose SLOs a given fleet meets: users who read and think, or requests in flight.

All clients wait for their answers, so only a simulation of all of them on the whole fleet tells what they send. More
users include the fewer, so the search by bisection compares like with like. It assumes that more clients never mend an
SLO. It is exact up to 100 clients, and to 1 % above.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar, NamedTuple

import pyarrow as pa

from tokentwin.planning.made_up import assumed
from tokentwin.planning.plan.candidates import Engine
from tokentwin.planning.plan.objectives import parse_objectives
from tokentwin.planning.plan.planner import questioned
from tokentwin.planning.plan.pricing import priced_candidates
from tokentwin.planning.plan.request import FleetRequest
from tokentwin.planning.plan.search import Bisection
from tokentwin.planning.plan.sensitivity import first_broken
from tokentwin.planning.plan.trial import FAST, LIKELY, SLOW, Question, Trial, cost_at, simulated
from tokentwin.planning.pooling import check_pooling
from tokentwin.planning.progress import Tell, quiet
from tokentwin.planning.traffic import clients_of
from tokentwin.planning.workers import Workers
from tokentwin.serving.answers.document import Document, Part, fact
from tokentwin.serving.answers.figures import counted, shown_band, shown_usd
from tokentwin.serving.answers.report import COUNT, FIGURE, USD, Column, Line, Table
from tokentwin.serving.errors import UserError
from tokentwin.serving.version import __version__
from tokentwin.traces.distributions import Users
from tokentwin.traces.document_table import table_of

_MOST = 1_000_000
_EXACT = 100  # a number of clients up to which the answer is exact; above, it is exact to one of so many


class Borne(Part):
    """A fleet and the largest numbers of clients for which it meets every SLO."""

    engine: str = fact("one replica")
    replicas: int = fact("replicas that serve the traffic")
    gpus: int = fact("GPUs of all replicas, spares included")
    usd_per_hour: float = fact("price of all GPUs, spares included", "$/h")
    clients: int = fact("largest number of clients with the accepted risk, given the uncertainty of step times")
    as_predicted: int = fact("the same if steps take as long as predicted")
    if_slow: int = fact("the same at the slow end of the 90 % interval of step times")
    if_fast: int = fact("the same at the fast end")
    seen: dict[str, str] = fact("the observed value of each objective with this number of clients", default={})
    breaks: str | None = fact("objective that breaks first beyond this number; null if none does", default=None)
    level: str = fact("trust in the fleet's step times", default="")
    reason: str = fact("reason of the level", default="")


class MostClientsDocument(Document):
    """The answer to how many clients fleets can bear, the fleet that bears the most for its price first."""

    what: ClassVar[str] = "a number of users"
    where: ClassVar[str] = "most users"

    answer: str = fact("the number and the fleet, in a sentence")
    objectives: tuple[str, ...] = fact("objectives that must hold")
    risk: float = fact("share of cases in which SLOs may break", "fraction")
    fleets: tuple[Borne, ...] = fact("the fleets, by engine")
    assumed: str = fact("sentence about traffic that was made up; empty for a specification", default="")
    version: str = fact("version of tokentwin", default="")
    inputs: dict[str, Any] = fact('`{"command": ...}`, or the inputs of the question', default={})

    @property
    def feasible(self) -> bool:
        """True if a fleet bears at least one client."""
        return any(fleet.clients for fleet in self.fleets)

    @property
    def tables(self) -> tuple[str, ...]:
        return ("fleets",)

    def table(self, name: str) -> pa.Table:
        """Return `fleets`: a row for every fleet."""
        return table_of(Borne, self.fleets)

    def report(self) -> Iterator[Line | Table]:
        yield Line(self.answer, "headline")
        if self.assumed:
            yield Line(self.assumed)
        rows = [
            (
                f"{fleet.replicas} × {fleet.engine}",
                *(fleet.gpus, fleet.usd_per_hour, fleet.clients, fleet.as_predicted),
                shown_band(fleet.if_slow, fleet.if_fast),
            )
            for fleet in self.fleets
        ]
        numbers = (Column("at the\nrisk", COUNT), Column("as\npredicted", COUNT), Column("slow to\nfast", FIGURE))
        yield Table((Column("fleet"), Column("GPUs", COUNT), Column("$/h", USD), *numbers), rows, "Most clients")
        for fleet in self.fleets:
            if fleet.seen:
                seen = ", ".join(f"{objective} ({value})" for objective, value in fleet.seen.items())
                yield Line(f"{fleet.engine}: observed {seen}; with more, {fleet.breaks or 'nothing'} breaks first")
            if fleet.level:
                yield Line(f"{fleet.engine}: {fleet.level} ({fleet.reason})")


class _Most(NamedTuple):
    """The largest number of clients, the run with them, and the run with the lowest number that was too many."""

    clients: int
    run: Trial | None
    broken: Trial | None


def most_clients(request: FleetRequest, *, jobs: int | None = None, tell: Tell = quiet) -> MostClientsDocument:
    """Return the largest number of clients that `request.replicas` replicas of each candidate bear.

    Raises UserError unless the traffic is a specification of clients who wait for answers.
    """
    loop = request.loop
    if loop is None:
        remedy = "needs users who wait for answers: --prompt and --output with --users, or a specification with them"
        raise UserError("replicas", request.replicas, remedy)
    objectives = parse_objectives(request.slos)
    workload = request.workload(at_named_rate=True)
    engines, ruled_out, pricing = priced_candidates(request, workload)
    if not engines:
        raise UserError("gpu", ruled_out[0].name, f"cannot serve: {ruled_out[0].reason}")
    check_pooling(workload, (engine.deployment.model for engine in engines), objectives.metrics)
    question = questioned(request, workload, objectives, pricing)
    tell(f"searching the most clients of {counted(len(engines), 'fleet')}", 0.0)
    with Workers(question, jobs) as workers:
        borne = workers.run([partial(_borne, engine=one, replicas=request.replicas) for one in engines])
    spares = request.spares
    fleets = [
        fleet.model_copy(
            update={
                "gpus": (fleet.replicas + spares) * engine.gpus,
                "usd_per_hour": (fleet.replicas + spares) * engine.usd_per_hour,
            }
        )
        for engine, fleet in zip(engines, borne, strict=True)
    ]
    fleets.sort(key=lambda fleet: -fleet.clients / (fleet.usd_per_hour or 1.0))
    who = "user" if isinstance(loop.arrivals, Users) else "request in flight"
    return MostClientsDocument(
        answer=_answer(fleets[0], who),
        objectives=tuple(objective.text for objective in objectives.slos),
        risk=request.risk,
        fleets=tuple(fleets),
        assumed=assumed(loop),
        version=__version__,
        inputs=request.as_json(),
    )


def _answer(best: Borne, who: str) -> str:
    fleet = f"{counted(best.replicas, 'replica')} x {best.engine} ({shown_usd(best.usd_per_hour)}/h)"
    if not best.clients:
        return f"Infeasible: {fleet} breaks {best.breaks} even for 1 {who}."
    plural = who.replace("request", "requests") if who.startswith("request") else f"{who}s"
    band = shown_band(best.if_slow, best.if_fast)
    many = f"{best.clients:,} {who if best.clients == 1 else plural}"
    return f"{many}: so many does {fleet} bear within the SLOs. Slow to fast steps: {band}."


def _borne(question: Question, engine: Engine, replicas: int) -> Borne:
    """Return the largest numbers of clients with step times as predicted, at the accepted risk, and at both ends."""
    assert question.loop is not None
    likely = search_most(question, engine, replicas, LIKELY, 0, clients_of(question.loop))
    planned = slow = fast = likely
    if likely.clients:
        there = question.for_clients(likely.clients)
        share = max(1 - question.risk, LIKELY)
        planned = search_most(there, engine, replicas, share, 0, likely.clients, likely.clients + 1)
        slow = search_most(there, engine, replicas, SLOW, 0, planned.clients, planned.clients + 1)
        fast = search_most(there, engine, replicas, FAST, likely.clients, round(1.25 * likely.clients))
    figures, broken = planned.run.figures if planned.run else None, planned.broken or likely.broken
    objectives = question.objectives
    seen = zip(objectives.slos, figures.observed, strict=True) if figures else ()
    return Borne(
        engine=engine.name,
        replicas=replicas,
        gpus=replicas * engine.gpus,
        usd_per_hour=replicas * engine.usd_per_hour,
        clients=planned.clients,
        as_predicted=likely.clients,
        if_slow=slow.clients,
        if_fast=fast.clients,
        seen={o.text: objectives.seen(o, value, figures.broken) for o, value in seen} if figures else {},
        breaks=first_broken(question, broken) if broken else None,
        **(figures.trust._asdict() if figures else {}),
    )


def search_most(
    question: Question, engine: Engine, replicas: int, share: float, least: int, start: int, too_many: int | None = None
) -> _Most:
    """Return the largest number of clients for which every objective holds; `least` is known to be borne.

    Step times are not exceeded in `share` of the cases; their uncertainty is that of the question's own clients.
    """
    most = _Most(least, None, None)
    search = Bisection(low=least, most=_MOST, start=max(start, least + 1), high=too_many)
    while not search.done and (search.high is None or search.high - search.low > max(search.low // _EXACT, 1)):
        number = search.ask()
        cost = cost_at(question, engine, replicas, share)
        trial = simulated(question.for_clients(number), engine, cost, replicas)
        search = search.answered(number, not trial.met)
        most = most._replace(clients=number, run=trial) if trial.met else most._replace(broken=trial)
    return most
