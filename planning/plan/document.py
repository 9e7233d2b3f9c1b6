"""A plan as one document: the answer, the evidence for it, the alternatives that lost, and its inputs.

`tokentwin plan` prints and saves it, a job of the Plan page keeps it, and `tokentwin export` reads it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pyarrow as pa
from pydantic import computed_field

from tokentwin.planning.plan.frontier import Fleet, Point, per_dollar, per_gpu, unbeaten
from tokentwin.planning.plan.mixed_fleet import MixedFleet
from tokentwin.planning.plan.offered_load import OverTime
from tokentwin.serving.answers.document import Document, Number, Part, fact
from tokentwin.serving.answers.figures import (
    NOTHING,
    counted,
    shown_band,
    shown_change,
    shown_number,
    shown_share,
    shown_usd,
)
from tokentwin.serving.answers.report import COUNT, FIGURE, SHARE, USD, Column, Form, Line, Table
from tokentwin.serving.deployments.config import Deployment, parse
from tokentwin.serving.deployments.inter_node import inter_node, nodes_of
from tokentwin.traces.document_table import table_of

SURE = 0.99  # the greatest probability that is shown, because the tail of the error beyond it is not known


def percent(probability: float) -> str:
    """Return a probability in whole percent, or `> 99 %`."""
    return f"> {shown_share(SURE)}" if probability >= SURE else shown_share(probability or 1e-9)


class Observed(Part):
    """The latencies and the queue of a fleet."""

    observed: dict[str, Number] = fact("figures by objective: a percentile in ms, or the attainment", default={})
    e2e_p99_s: Number = fact("99th percentile of E2E", "s", default=None)
    piling_up_per_s: float = fact("growth of the fleet's queue in steady operation", "requests/s", default=0.0)


class Offered(Observed, Point):
    """A fleet that meets all objectives if steps are as predicted, and the probability that it does."""

    holds: Number = fact(
        "probability that every SLO holds, given the uncertainty of step times and other random traffic; null if "
        "unknown",
        "fraction",
        default=None,
    )


class Fewer(Observed):
    """One replica fewer than recommended; observed figures are those with slow steps if only slow steps break SLOs."""

    attainment: float = fact("share of the requests within every bound if steps are as predicted", "fraction")


class FleetPoint(Part):
    """The figures of a number of replicas, with step times as predicted and at both ends of their 90 % interval."""

    replicas: int = fact("replicas that carry the traffic")
    attainment: float = fact("share of the requests within every bound", "fraction")
    if_slow: float = fact(
        "share of the requests within every bound, at the slow end of the 90 % interval of step times", "fraction"
    )
    if_fast: float = fact("the same at the fast end", "fraction")
    broken_if_slow: str = fact("the SLOs that break at the slow end, with the observed values; else empty", default="")
    tok_s_user_if_slow: Number = fact("output tokens/s of the median user at the slow end", "tokens/s", default=None)
    tok_s_user_if_fast: Number = fact("the same at the fast end", "tokens/s", default=None)
    level: str = fact("trust in the fleet's step times", default="")
    reason: str = fact("reason of the level", default="")

    @property
    def band(self) -> str:
        """The 90 % band of the attainment: `58.0 % to 100 %`."""
        return " to ".join(shown_share(end, 1) for end in (self.if_slow, self.if_fast))

    @property
    def attained(self) -> str:
        """The attainment with its band: `99.3 % (58.0 % to 100 %)`."""
        return f"{shown_share(self.attainment, 1)} ({self.band})"


class Choice(FleetPoint):
    """A number of replicas that a user may choose, depending on the accepted risk."""

    gpus: int = fact("GPUs of all replicas, spares included")
    usd_per_hour: float = fact("price of all GPUs, spares included", "$/h")
    holds: Number = fact("probability that every SLO holds; null if unknown", "fraction")


class Choices(Part):
    """The recommended engine with fewer and more replicas. Two choices with equal numbers of replicas are identical."""

    as_predicted: Choice = fact("the fewest replicas that meet every SLO if steps take as long as predicted")
    recommended: Choice = fact("the answer, whose SLOs hold with the accepted risk")
    whole_interval: Choice | None = fact(
        "the fewest replicas that meet every SLO even at the slow end of the 90 % interval of step times; null if no "
        "number does"
    )

    @property
    def existing(self) -> tuple[Choice, ...]:
        """The choices that exist, in their order."""
        return tuple(filter(None, (self.as_predicted, self.recommended, self.whole_interval)))


class TrustSection(Part):
    """The trust in step times."""

    level: str = fact("level: validated, interpolated, extrapolated or unknown")
    reason: str = fact("reason of the level")


class NextMeasurement(Part):
    """The run on one replica that would narrow the predicted latencies most, and the effect it would have."""

    concurrency: int = fact("requests in flight in the closed loop")
    prompt_tokens: int = fact("length of each prompt", "tokens")
    output_tokens: int = fact("length of each answer", "tokens")
    tpot_interval: tuple[float, float] = fact("90 % interval of the mean TPOT as factors of the prediction")
    tpot_interval_after: tuple[float, float] = fact("the same after this measurement")
    ttft_interval: tuple[float, float] = fact("90 % interval of the mean TTFT as factors of the prediction")
    ttft_interval_after: tuple[float, float] = fact("the same after this measurement")
    command: str = fact("the command that makes the measurement, against a server at localhost:8000")

    @property
    def effect(self) -> str:
        """The measurement and its expected effect, in words."""
        return (
            f"one replica with {self.concurrency:,} requests in flight would narrow the 90 % interval of the mean TPOT "
            f"from {_range(self.tpot_interval)} to {_range(self.tpot_interval_after)}, and of the mean TTFT from "
            f"{_range(self.ttft_interval)} to {_range(self.ttft_interval_after)}; repeat the plan with "
            "--measured next.json"
        )

    def report(self) -> Iterator[Line]:
        yield Line(f"measure next: {self.effect}")
        yield Line(self.command, "command")


def _range(factors: tuple[float, float]) -> str:
    """Return an interval of factors as changes in percent."""
    return f"{shown_band(100 * (factors[0] - 1), 100 * (factors[1] - 1), 2)} %"


class Energy(Part):
    """The power of the recommended fleet and the energy of an output token, estimated from MFU and MBU."""

    power_w: float = fact("mean power of all GPUs in steady operation, spares included, times the PUE", "W")
    power_w_interval: tuple[float, float] = fact("90 % interval of the power, by errors for published runs", "W")
    joules_per_token: float = fact("energy per output token", "J")
    joules_per_token_interval: tuple[float, float] = fact("the same interval of the energy per output token", "J")
    co2_g_per_mtok_out: Number = fact("carbon per million output tokens; null without a grid", "gCO2/Mtok")
    pue: float = fact("power usage effectiveness that the figures contain; 1: GPUs alone")
    reason: str = fact("how far to trust the figures")

    @property
    def sentence(self) -> str:
        """The figures in words."""
        watts, joules = shown_number(self.power_w), shown_number(self.joules_per_token)
        carbon = self.co2_g_per_mtok_out
        grams = "" if carbon is None else f", {shown_number(carbon)} gCO2 per million output tokens"
        return (
            f"power {watts} W ({shown_band(*self.power_w_interval)}), {joules} J per output token "
            f"({shown_band(*self.joules_per_token_interval)}), {shown_number(1 / self.joules_per_token)} output tokens "
            f"per joule{grams}, for {'GPUs alone' if self.pue == 1 else f'a PUE of {self.pue:g}'}: {self.reason}"
        )


class Recommendation(Offered):
    """The recommended fleet, and the evidence for it."""

    deployment: dict[str, Any] = fact("the deployment of one replica; with a split, it includes the replica's fleet")
    vllm_serve: str | None = fact("the command that serves one replica; null if there is none")
    one_fewer: Fewer | None = fact("figures with one replica fewer; null if no replica would be left", default=None)
    choices: Choices | None = fact("numbers of replicas for less and for more caution; null if unknown", default=None)
    headroom_percent: int | None = fact(
        "increase of the rate up to which the fleet still meets every SLO; null if unknown", "%", default=None
    )
    headroom_band: tuple[int, int | None] | None = fact(
        "the same at the slow and the fast end of the 90 % interval of step times (null: nothing that was tried broke "
        "it); 0 where slow steps break another draw of the traffic; null if unknown",
        "%",
        default=None,
    )
    breaks_first: str | None = fact(
        "objective that breaks beyond the headroom; null if none broke at the highest rate that was tried", default=None
    )
    plausible_gpus: tuple[int, int | None] | None = fact(
        "GPUs needed at the fast and at the slow end of the 90 % interval of step times (null: no number is enough); "
        "null if unknown",
        default=None,
    )
    draws: tuple[float, ...] = fact(
        "probability that every SLO holds on the traffic drawn with each other seed, given the uncertainty of step "
        "times",
        "fraction",
        default=(),
    )
    trust: TrustSection = fact("trust in the fleet's step times")
    energy: Energy | None = fact("power and energy of the fleet; null if not asked for", default=None)
    seen: dict[str, str] = fact("the observed value of each objective, in words", default={})
    next_measurement: NextMeasurement | None = fact(
        "the measurement that would narrow the predicted latencies most; null if published runs do not time the steps",
        default=None,
    )

    def to_change(self) -> Deployment:
        """Return the deployment for a user who changes it; KV blocks that came from memory come from it again."""
        stated = {**self.deployment, "scheduler": dict(self.deployment.get("scheduler", {}))}
        if stated.get("gpu_memory_utilization") is not None:
            stated["scheduler"].pop("num_blocks", None)
        return parse(Deployment, stated, where="plan")

    @property
    def headroom(self) -> str:
        """The headroom in percent; `more than ...` if no rate that was tried broke an SLO."""
        if self.headroom_percent is None:
            return "unknown"
        return f"{'' if self.breaks_first else 'more than '}{self.headroom_percent} %"

    @property
    def beyond_headroom(self) -> str:
        """The objective that breaks beyond the headroom, in a clause."""
        return f"with more than {self.headroom_percent} % more traffic, {self.breaks_first} breaks first"

    @property
    def headroom_range(self) -> str:
        """The range of the headroom from slow to fast steps, over all draws of the traffic; empty if unknown."""
        return "" if self.headroom_band is None else f"{shown_band(*self.headroom_band)} %"

    @property
    def plausible(self) -> str:
        """The range of the number of GPUs needed, from the fast to the slow end of the 90 % interval of step times."""
        return "unknown" if self.plausible_gpus is None else shown_band(*self.plausible_gpus)

    @property
    def elsewhere(self) -> str:
        """The probability that the SLOs hold on other draws of the traffic; empty if there are no others."""
        return " and ".join(map(percent, self.draws)) + " of cases" if self.draws else ""


class Dearer(Part):
    """An engine whose search ended early, because its cheapest fleet costs more than the answer."""

    engine: str = fact("one replica")
    usd_per_hour_at_least: float = fact("lowest possible price of a fleet of this engine", "$/h")
    gpus_at_least: int | None = fact("lowest possible number of its GPUs", default=None)


class Infeasible(Part):
    """An engine for which no number of replicas is enough."""

    engine: str = fact("one replica")
    reason: str = fact("objective that breaks, and by how much; or the reason why the engine does not fit")
    borderline: bool = fact("whether the excess is within the uncertainty of step times", default=False)


class LoadPoint(Part):
    """The latencies of the recommended fleet at one rate; a percentile is null if its request did not finish."""

    requests_per_s: float = fact("mean rate", "requests/s")
    ttft_p99_ms: Number = fact("99th percentile of TTFT", "ms")
    tpot_p99_ms: Number = fact("99th percentile of TPOT", "ms")
    ttft_p99_if_slow_ms: Number = fact(
        "99th percentile of TTFT at the slow end of the 90 % interval of step times", "ms", default=None
    )
    tpot_p99_if_slow_ms: Number = fact("99th percentile of TPOT at the same end", "ms", default=None)
    attainment: float = fact("share of the requests within every bound", "fraction", default=0.0)
    level: str = fact("trust in the fleet's step times", default="")
    reason: str = fact("reason of the level", default="")


class RatePoint(Point):
    """The figures of an engine's replicas at one rate of the plan's traffic."""

    requests_per_s: float = fact("mean rate of one replica", "requests/s")
    concurrency: float = fact("mean number of requests in one replica at a time (Little's law)")


class EngineCurve(Part):
    """The capacity of an engine within the SLOs, on the recommended number of GPUs but no more than 16 replicas."""

    engine: str = fact("one replica")
    gpu: str = fact("GPU of the engine")
    points: tuple[RatePoint, ...] = fact(
        "points by rate; the last is the highest at which every SLO holds; empty if none does"
    )
    planned: RatePoint | None = fact(
        "the same requests at the planned rate of one replica of the recommended fleet; null for other engines",
        default=None,
    )


class Candidate(Part):
    """An engine that was considered."""

    gpu: str = fact("GPU of the engine", default="")
    deployment: dict[str, Any] = fact("the deployment of one replica", default={})
    kv_tokens: int | None = fact("tokens for which one engine has KV blocks", "tokens", default=None)
    kv_requests: float | None = fact(
        "requests of mean length for which one engine has KV blocks", "requests", default=None
    )
    defaults: str = fact("settings that have the engine's defaults, with their values", default="")


class Histogram(Part):
    """The distribution of a length."""

    edges: tuple[float, ...] = fact("edges of the bins, evenly spaced logarithms", "tokens", min_length=2)
    percent: tuple[float, ...] = fact("percentage of the requests between each edge and the next", "%", min_length=1)


class Lengths(Part):
    """The lengths of prompts and outputs."""

    prompt: Histogram = fact("prompts")
    output: Histogram = fact("outputs")


class PlanDocument(Document):
    """The answer to a plan. Without a recommendation it is infeasible, and the first of `infeasible` came closest."""

    what: ClassVar[str] = "a plan"
    where: ClassVar[str] = "plan"

    answer: str = fact("the fleet and its risk, in short sentences")
    objectives: tuple[str, ...] = fact("objectives that must hold")
    requests: int = fact("number of requests simulated on every fleet")
    span_s: float = fact("time from the first arrival to the last", "s")
    too_short: str | None = fact("warning about traffic that ends before the recommended fleet is full", default=None)
    risk: float = fact("share of cases in which SLOs may break", "fraction", default=0.5)
    rank_by: str = fact("what the answer has little of: price or gpus", default="price")
    spares: int = fact("spare replicas of every fleet, for replicas that may fail")
    recommendation: Recommendation | None = fact("the best fleet that meets every SLO")
    risk_told: str | None = fact("fleets for less and for more caution, in sentences", default=None)
    runners_up: tuple[Offered, ...] = fact("the next cheapest fleets, of other engines")
    mixes: tuple[MixedFleet, ...] = fact(
        "fleets of several pools, if asked for: first the one with the highest worth among those that keep the SLOs",
        default=(),
    )
    mixed: str | None = fact(
        "how the first of them compares with the best fleet of a single kind, in sentences", default=None
    )
    near_ties: tuple[str, ...] = fact("fleets that cost little more than the answer, compared with it", default=())
    dearer: tuple[Dearer, ...] = fact("engines whose search ended early because they cost more, the cheapest first")
    infeasible: tuple[Infeasible, ...] = fact(
        "engines that cannot meet the SLOs, the closest first; then engines that fit on no GPU"
    )
    frontier: tuple[Point, ...] = fact(
        "fleets that no other fleet beats in both tokens/s per user and tokens/s per GPU"
    )
    frontier_by_price: tuple[Point, ...] = fact(
        "fleets that no other fleet beats in both tokens/s per user and tokens per dollar"
    )
    points: tuple[Point, ...] = fact("every fleet that was simulated to its end, by engine and replicas")
    trials: int = fact("number of fleets simulated in the search", default=0)
    why_not_fewer: str | None = fact("reason why one replica fewer is not enough, in a sentence")
    requests_per_s: float | None = fact("mean rate; null if all requests arrive at once", "requests/s")
    candidates: dict[str, Candidate] = fact("engines that were considered, by name", default={})
    lengths: Lengths = fact("distribution of the lengths of prompts and outputs")
    over_time: OverTime | None = fact(
        "the traffic over time; null if all requests arrive at once, and in older answers", default=None
    )
    by_replicas: tuple[FleetPoint, ...] = fact("the recommended engine with more and fewer replicas")
    by_rate: tuple[LoadPoint, ...] = fact("the recommended fleet with more and less traffic")
    engine_curves: tuple[EngineCurve, ...] = fact("capacity of each engine", default=())
    mean_prompt_tokens: float | None = fact("mean length of a prompt", "tokens", default=None)
    mean_output_tokens: float | None = fact("mean length of an output", "tokens", default=None)
    clients: int | None = fact("clients who wait for answers; null if requests come at a rate", default=None)
    assumed: str = fact("sentence about traffic that was made up; empty for a trace or a specification", default="")
    seen_by: str = fact(
        "sentence that says that latencies are those that clients of a learnt server see; else empty", default=""
    )
    unforgiving: tuple[str, ...] = fact(
        "objectives that not a single request may break, because there are so few requests", default=()
    )
    omitted: tuple[str, ...] = fact("parts around the answer that failed, with the reason", default=())
    version: str = fact("version of tokentwin", default="")
    inputs: dict[str, Any] = fact('`{"command": ...}`, or the inputs of the page', default={})

    @computed_field  # type: ignore[prop-decorator]
    @property
    def feasible(self) -> bool:
        """True if a fleet meets every SLO."""
        return self.recommendation is not None or any(mix.met for mix in self.mixes)

    def gpu_of(self, point: Fleet) -> str:
        """Return the GPU of a fleet; empty if the document does not say."""
        return self.candidates[point.engine].gpu if point.engine in self.candidates else ""

    def place(self, fleet: Point) -> int | None:
        """Return the index in `points` of the fleet with the same engine and replicas."""
        same = (at for at, p in enumerate(self.points) if (p.engine, p.replicas) == (fleet.engine, fleet.replicas))
        return next(same, None)

    @property
    def tables(self) -> tuple[str, ...]:
        return ("fleets", "mixes") if self.mixes else ("fleets",)

    def table(self, name: str) -> pa.Table:
        """Return `fleets`, with a row for every fleet that was simulated to its end, or `mixes`, the mixed fleets."""
        if name == "mixes":
            return table_of(_Mix, [{**dict(mix), "fleet": mix.name} for mix in self.mixes])
        recommended = self.recommendation and self.place(self.recommendation)
        holds = self.hold_probabilities
        for_gpus, for_money = (set(unbeaten(self.points, gain)) for gain in (per_gpu, per_dollar))
        rows = [
            {
                **dict(point),
                "recommended": at == recommended,
                "holds": holds.get((point.engine, point.replicas)),
                "on_frontier": at in for_gpus,
                "on_frontier_by_price": at in for_money,
                "kv_tokens": self.candidates[point.engine].kv_tokens if point.engine in self.candidates else None,
            }
            for at, point in enumerate(self.points)
        ]
        return table_of(_Fleet, rows)

    @property
    def hold_probabilities(self) -> dict[tuple[str, int], float | None]:
        """The probability that every SLO holds, by engine and replicas."""
        best = self.recommendation
        if best is None:
            return {}
        choices = best.choices.existing if best.choices else ()  # over all draws of the traffic
        offered = {(offer.engine, offer.replicas): offer.holds for offer in (*self.runners_up, best)}
        return offered | {(best.engine, choice.replicas): choice.holds for choice in choices}

    def report(self) -> Iterator[Line | Table]:
        best = self.recommendation
        yield Line(self.answer, "headline")
        yield from map(Line, _details(self))
        yield from self.shown_others()
        if self.runners_up:
            yield self.shown_offers()
        if self.mixes:
            yield self.shown_mixes()
        if self.frontier:
            both = (*self.frontier, *self.frontier_by_price)
            points = list(dict.fromkeys(sorted(both, key=lambda point: -(point.tok_s_user or 0.0))))
            frontiers = (("GPU", self.frontier), ("$", self.frontier_by_price))
            best_per = [" ".join(name for name, frontier in frontiers if point in frontier) for point in points]
            title = (
                "Frontier: fleets within the SLOs that no other beats in tok/s per user and per GPU, "
                "or per user and per dollar"
            )
            yield self.fleets(points, [(Column("best\nper"), best_per)], title)
        if best is not None and best.vllm_serve:
            yield Line(best.vllm_serve, "command")
        if best is not None and best.next_measurement:
            yield from best.next_measurement.report()

    def fleets(self, points: Sequence[Point], more: Sequence[tuple[Column, Sequence[Any]]], title: str = "") -> Table:
        """Return a table of fleets with their prices and throughputs, and `more` columns with their cells."""
        more = [*_energy_columns(points), *more]
        pooling = self.mean_output_tokens == 0
        rows = [
            (
                _SETTING.sub("\n ", point.called(self.spares)),
                *(point.gpus, point.usd_per_hour),
                *((point.usd_per_mtok_total,) if pooling else _per_output_token(point)),
                point.attainment,
                *(cells[at] for _, cells in more),
            )
            for at, point in enumerate(points)
        ]
        costs = (*_FLEET, *(_OF_PROMPTS if pooling else _OF_OUTPUTS), Column("attain-\nment", SHARE))
        return Table((*costs, *(column for column, _ in more)), rows, title)

    def shown_offers(self) -> Table:
        """Return the fleets that meet the SLOs, the recommended fleet first, with the KV capacity of an engine."""
        best = self.recommendation
        offers = [*([best] if best else ()), *self.runners_up]
        rooms = [self.candidates.get(offer.engine, Candidate()) for offer in offers]
        holds = self.hold_probabilities
        more: list[tuple[Column, Sequence[Any]]] = [
            (Column("SLOs\nhold", FIGURE), [_shown_probability(holds[o.engine, o.replicas]) for o in offers]),
            (Column("KV room\n(tokens)", COUNT, ROOM_HELP, spare=2), [room.kv_tokens for room in rooms]),
            (Column("KV room\n(requests)", _ROUND, ROOM_HELP, spare=1), [room.kv_requests for room in rooms]),
        ]
        return self.fleets(offers, more, "Fleets that meet the SLOs")

    @property
    def winning_mix(self) -> MixedFleet | None:
        """The mixed fleet that is the answer; None if a fleet of a single kind is."""
        first = self.mixes[0] if self.mixes else None
        return first if first is not None and self.answer.startswith(f"{first.name} = ") else None

    def shown_mixes(self) -> Table:
        """Return the mixed fleets, after the best fleet of a single kind if there is one."""
        best = self.recommendation
        rows: list[tuple[Any, ...]] = []
        if best is not None:
            holds = self.hold_probabilities[best.engine, best.replicas]
            single = (NOTHING, _shown_probability(holds), best.attainment, None, None)
            rows.append((best.called(self.spares), best.gpus, best.usd_per_hour, *single))
        for mix in self.mixes:
            change = NOTHING if mix.change is None else shown_change(100 * mix.change, 0)
            known = (change, _shown_probability(mix.holds), mix.attainment, mix.if_interrupted, mix.without_spot)
            rows.append((mix.name, mix.gpus, mix.usd_per_hour, *known))
        spot = any(mix.interruptions is not None for mix in self.mixes)
        columns = [*_FLEET, *_OF_MIXES, *(_OF_SPOT if spot else ())]
        return Table(tuple(columns), [row[: len(columns)] for row in rows], "Mixed fleets, after the best single kind")

    def shown_others(self) -> Iterator[Line]:
        """Yield the engines that cost more or cannot meet the SLOs, with the reason."""
        for dearer in self.dearer:
            more, least = "more expensive", f"{shown_usd(dearer.usd_per_hour_at_least)}/h"
            if self.rank_by == "gpus":
                more, least = "more GPUs", f"{dearer.gpus_at_least:,}"
            yield Line(f"{more}: {dearer.engine}, at least {least}{self._room(dearer.engine)}")
        for no in self.infeasible[self.recommendation is None :]:  # without one, the answer has the first
            verdict = "borderline" if no.borderline else "not feasible"
            yield Line(f"{verdict}: {no.engine}: {no.reason}{self._room(no.engine)}")

    def _room(self, engine: str) -> str:
        room = self.candidates.get(engine, Candidate())
        if room.kv_tokens is None or room.kv_requests is None:
            return ""
        return f" (KV room for {room.kv_tokens:,} tokens, {room.kv_requests:,.0f} requests)"

    @property
    def traffic(self) -> str:
        """The number, the rate and the mean lengths of the requests."""
        lengths = (self.mean_prompt_tokens, self.mean_output_tokens)
        if self.clients is not None:
            return clients_in_words(self.clients, self.requests_per_s, *lengths)
        return traffic_in_words(self.requests, self.span_s, self.requests_per_s, *lengths)


def traffic_in_words(
    requests: int, seconds: float, rate: float | None, prompt_tokens: float | None, output_tokens: float | None
) -> str:
    """Return in words the number of requests, their time span, the rate (None: all at once), and known mean lengths."""
    arriving = "all at once" if rate is None else f"{shown_number(rate)} per second"
    text = f"{counted(requests, 'request')} in {shown_number(seconds)} s, {arriving}"
    return text + _lengths_in_words(prompt_tokens, output_tokens)


def clients_in_words(clients: int, rate: float | None, prompt_tokens: float | None, output_tokens: float | None) -> str:
    """Return in words the number of clients who wait, their requests per second on the answer's fleet, and lengths."""
    text = f"{counted(clients, 'client')} who wait for answers"
    if rate is not None:
        text += f", {shown_number(rate)} requests per second on this fleet"
    return text + _lengths_in_words(prompt_tokens, output_tokens)


def _lengths_in_words(prompt_tokens: float | None, output_tokens: float | None) -> str:
    if prompt_tokens is None or output_tokens is None:
        return ""
    if not output_tokens:
        return f"; {shown_number(prompt_tokens)} prompt tokens on average, no output tokens (pooling requests)"
    return f"; {shown_number(prompt_tokens)} prompt and {shown_number(output_tokens)} output tokens on average"


class _Mix(MixedFleet):
    fleet: str = fact("the pools in words")


class _Fleet(Point):
    recommended: bool = fact("whether this is the answer")
    holds: Number = fact("probability that every SLO holds; null if unknown", "fraction")
    on_frontier: bool = fact(
        "whether the fleet meets every SLO, and no other such fleet beats it in both tokens/s per user and per GPU"
    )
    on_frontier_by_price: bool = fact("whether the same holds for tokens/s per user and tokens per dollar")
    kv_tokens: int | None = fact("tokens for which one engine has KV blocks", "tokens")


ROOM_HELP = "Capacity of one engine's KV memory: in tokens, or in requests of mean length with complete answers."
_SETTING = re.compile(r" (?=\w+=)")  # the space before a setting in an engine's name; settings go on separate lines
_ROUND = Form(lambda count: NOTHING if count is None else f"{count:,.0f}", "%.0f")
_FLEET = (Column("fleet"), Column("GPUs", COUNT), Column("$/h", USD))
_OF_PROMPTS = (Column("$/Mtok\nprompt", USD),)
_OF_OUTPUTS = (
    Column("tok/s\na user", Form(shown_number, "%.0f")),
    Column("tok/s\na GPU", Form(shown_number, "%.0f")),
    Column("$/Mtok\noutput", USD),
)
_OF_MIXES = (
    Column("against\nsingle", FIGURE),
    Column("SLOs\nhold", FIGURE),
    Column("attain-\nment", SHARE),
)
_OF_SPOT = (
    Column("one in-\nterrupted", SHARE, "attainment with one interruption half way through the traffic", spare=1),
    Column("all spot\ngone", SHARE, "attainment if all spot GPUs are gone", spare=1),
)
_ENERGY = {
    "power_w": Column("W", Form(shown_number, "%.0f"), "estimated mean power of all GPUs in steady operation", spare=4),
    "joules_per_token": Column("J/tok\noutput", Form(shown_number, "%.3g"), "energy per output token"),
    "co2_g_per_mtok_out": Column("gCO2/Mtok\noutput", Form(shown_number, "%.0f"), "carbon of that energy", spare=3),
}


def _shown_probability(holds: float | None) -> str:
    return NOTHING if holds is None else percent(holds)


def _energy_columns(points: Sequence[Point]) -> Iterator[tuple[Column, Sequence[Any]]]:
    """Yield the columns of power, energy and carbon that have a value."""
    for field, column in _ENERGY.items():
        cells = [getattr(point, field) for point in points]
        if any(cell is not None for cell in cells):
            yield column, cells


def _per_output_token(point: Point) -> tuple[float | None, float | None, float | None]:
    return point.tok_s_user, point.tok_s_gpu, point.usd_per_mtok_out


def _details(plan: PlanDocument) -> Iterator[str]:
    best = plan.recommendation
    if plan.rank_by == "gpus":
        yield "fleets are ranked by their number of GPUs, not by their price"
    if plan.mixed:
        yield plan.mixed
    if plan.risk_told:
        yield plan.risk_told
    if plan.too_short:
        yield plan.too_short
    yield f"traffic: {plan.traffic}"
    if plan.assumed:
        yield plan.assumed
    for objective in plan.unforgiving:
        yield f"{objective}: there are so few requests that not a single one may break it"
    if best is not None:
        if plan.winning_mix is not None:
            yield f"the next lines are about the best single kind, {best.called(plan.spares)}"
        headroom = best.headroom + (f" ({best.headroom_range})" if best.headroom_range else "")
        yield f"attainment {shown_share(best.attainment, 1)}, headroom {headroom}, plausible GPUs {best.plausible}"
        if best.elsewhere:
            yield f"with the traffic drawn with other seeds, the SLOs hold in {best.elsewhere}"
        if best.seen:
            yield "observed: " + ", ".join(f"{objective} ({seen})" for objective, seen in best.seen.items())
        yield from (f"almost as good: {tie}" for tie in plan.near_ties)
        if plan.why_not_fewer:
            yield f"why not one replica fewer: {plan.why_not_fewer}"
        if best.breaks_first:
            yield best.beyond_headroom
        yield f"trust in step times: {best.trust.level} ({best.trust.reason})"
        if best.energy:
            yield best.energy.sentence
    if plan.seen_by:
        yield plan.seen_by
    yield from (f"left out: {part}" for part in plan.omitted)
    if best is not None:
        if best.engine in plan.candidates and plan.candidates[best.engine].defaults:
            yield plan.candidates[best.engine].defaults
        deployment = parse(Deployment, best.deployment, where="deployment")
        if (nodes := nodes_of(deployment)) > 1:
            joined = inter_node(deployment)
            yield f"each engine runs on {nodes} nodes of {joined.gpus_per_node} GPUs, connected by {joined.link}"
