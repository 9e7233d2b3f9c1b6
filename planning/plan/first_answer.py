"""The likely range of a plan's answer, found within seconds from few and short simulations.

The lower end is the fewest replicas that meet the SLOs on the planned traffic, with steps as slow as the accepted risk
demands. The upper end is enough for every other draw of the traffic, too, or as many replicas as a higher probability
is worth. The range covers all candidates that may still have the highest worth.

Short traffic is simulated whole. For longer traffic the lower end comes from an ordinary stretch of it, and the upper
end from the busiest stretch. Only a part of a fleet is simulated, since replicas behind a router that spreads requests
evenly are alike. If there are many candidates, only the cheapest at the roofline are tried; the others are assumed to
exceed their roofline by the same factors.

The roofline estimate follows from the datasheet of the GPU. A step takes at least as long as its FLOPs at the GPU's
peak rate, and at least as long as its bytes at the memory's bandwidth (the roofline of Williams, Waterman and
Patterson, CACM 2009). The estimate assumes that every engine always runs as many requests as its KV memory allows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from statistics import fmean
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tokentwin.planning.plan.candidates import Engine
from tokentwin.planning.plan.draws import on_draw
from tokentwin.planning.plan.plan import Limits
from tokentwin.planning.plan.search import Bisection, search
from tokentwin.planning.plan.trial import LIKELY, Question, Trial, simulated, try_alone, try_fleet
from tokentwin.planning.traffic import clients_of, mean_rate
from tokentwin.planning.workers import Workers
from tokentwin.serving.deployments.gpu_spec import GpuSpec
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.workload import PRIVATE, Workload, WorkloadRequest
from tokentwin.traces.metrics.step_metrics import StepWork
from tokentwin.traces.reshape import only, reshaped


class MeanRequest(NamedTuple):
    """Mean numbers of tokens of a request.

    Attributes:
        prompt: tokens of the prompt
        computed: tokens of the part of the prompt that no other request has
        output: tokens of the answer
    """

    prompt: float
    computed: float
    output: float

    @classmethod
    def from_requests(cls, requests: Sequence[WorkloadRequest]) -> MeanRequest:
        """Return the means over `requests`."""
        return cls(
            fmean(request.prompt_len for request in requests),
            fmean(sum(tokens for key, tokens in request.prompt if key == PRIVATE) for request in requests),
            fmean(request.output_len for request in requests),
        )


class Roofline(NamedTuple):
    """Lower bounds of times in seconds.

    Attributes:
        token_s: time of an output token for a single user
        request_s: time that a request adds to a replica that runs many requests
    """

    token_s: float
    request_s: float

    @classmethod
    def from_engine(cls, engine: Engine, gpu: GpuSpec, mean: MeanRequest) -> Roofline:
        """Return the bounds of an engine whose GPUs are `gpu`."""
        context = mean.prompt + mean.output / 2
        batch = max(min(engine.kv_tokens / context, engine.deployment.scheduler.most_running), 1.0)
        work = StepWork(find_model(engine.deployment.model), engine.deployment, gpu)
        # Three steps: with one row, with all rows, and with a prompt. The prompt shares its step with decodes, so it
        # adds no time to read weights.
        compute, memory = _steps_s(work, [(0, 1, context), (0, batch, batch * context), (mean.computed, 0, 0)])
        request_s = max(mean.output * compute[1] / batch + compute[2], mean.output * memory[1] / batch)
        return cls(max(compute[0], memory[0]), request_s / (engine.split.engines if engine.split else 1))


def _steps_s(work: StepWork, steps: Sequence[tuple[float, float, float]]) -> tuple[list[float], list[float]]:
    """Return the times for FLOPs and the times for memory traffic of each step, in seconds.

    A step is given by its numbers of prompt tokens, of decode rows, and of tokens in the context of the decode rows.
    """
    prompts, rows, contexts = (np.array(column, dtype=float) for column in zip(*steps, strict=True))
    given = pa.table(
        {
            "prefill_tokens": prompts,
            "prefill_rows": np.minimum(prompts, 1.0),
            "prefill_pairs": prompts * (prompts + 1) / 2,
            "prefill_context": np.zeros(len(steps)),
            "decode_rows": rows,
            "decode_context": contexts,
            "draft_tokens": np.zeros(len(steps)),
            "sampled_rows": rows + np.minimum(prompts, 1.0),
        }
    )
    return (work.flops(given) / work.flop_per_s).tolist(), (work.moved_bytes(given) / work.bytes_per_s).tolist()


_TRIED = 6  # maximum number of candidates that are simulated
_WORK = 4000  # number of requests in one simulation of each candidate, summed over candidates
_MARGIN = 0.15  # share by which the rate of a stretch is raised and lowered
_ALONE = 150  # number of requests that are tried with a replica to themselves, since their latencies hardly differ


class Between(NamedTuple):
    """An engine, and the lowest and highest number of its replicas that the answer may have."""

    engine: Engine
    low: int
    high: int


class FirstAnswer(NamedTuple):
    """The range of all fleets that may be the answer, spares included.

    Attributes:
        gpus: lowest and highest number of GPUs
        usd_per_hour: lowest and highest price in dollars an hour
        engines: names of the engines that may be the answer, the cheapest first
    """

    gpus: tuple[int, int]
    usd_per_hour: tuple[float, float]
    engines: tuple[str, ...]


def first_answer(
    question: Question, engines: Sequence[Engine], limits: Limits, draws: Callable[[], Sequence[Workload]]
) -> FirstAnswer | None:
    """Return the range; None if probably no fleet meets the SLOs. `draws` returns other draws of the traffic."""
    ranked = at_roofline(question, engines)
    tried, rest = ranked[:_TRIED], ranked[_TRIED:]
    enough = _WORK // len(tried)
    fewest = _fewest(question, [engine for engine, _ in tried], limits, enough)
    if not fewest:
        return None
    whole = question.requests <= enough
    sized = replace(question, draws=tuple(draws()) if whole else ())
    cheapest = min(_weight(engine, low, limits) for engine, low in fewest)
    may_win = cheapest / (1 - question.risk)
    known = [
        Between(engine, low, _most(sized, engine, low, limits, enough, may_win))
        for engine, low in fewest
        if _weight(engine, low, limits) <= may_win
    ]
    at_least = {engine.name: replicas for engine, replicas in tried}
    factors = [low / at_least[engine.name] for engine, low in fewest]
    guessed = [Between(e, *(max(round(n * factor), 1) for factor in (min(factors), max(factors)))) for e, n in rest]
    return _spanning(known, guessed, limits)


def _spanning(known: Sequence[Between], guessed: Sequence[Between], limits: Limits) -> FirstAnswer:
    """Return the range of all fleets that may be the answer; `guessed` fleets may be cheaper than `known` ones."""
    dearest = max(_weight(engine, high, limits) for engine, _, high in known)
    ends = [(engine, n) for engine, low, high in known for n in (low, high)]
    for engine, low, high in guessed:
        least = _weight(engine, low, limits)
        ends += [(engine, n) for n in (low, high) if least <= _weight(engine, n, limits) <= dearest]
    ends.sort(key=lambda end: _weight(end[0], end[1], limits))
    bought = [(n + limits.spares) * engine.gpus for engine, n in ends]
    usd = [(n + limits.spares) * engine.usd_per_hour for engine, n in ends]
    return FirstAnswer((min(bought), max(bought)), (min(usd), max(usd)), tuple(dict.fromkeys(e.name for e, _ in ends)))


def at_roofline(question: Question, engines: Sequence[Engine]) -> list[tuple[Engine, float]]:
    """Return the engines and their numbers of replicas at the roofline, sorted by price.

    First comes the cheapest engine of each kind and number of GPUs, then the second cheapest of each, and so on.
    Engines that are too slow for a single user come last.
    """
    mean, rate = MeanRequest.from_requests(list(question.workload.requests)), mean_rate(question.workload)
    rate = rate if math.isfinite(rate) else 1.0  # a closed loop has no rate of its own, and engines keep their order
    slowest_s = dict(question.objectives.bounds).get("tpot_ms", math.inf) / 1e3

    def replicas(engine: Engine) -> tuple[bool, float]:
        gpu = engine.gpu_spec
        if gpu is None:
            return False, 1.0
        roofline = Roofline.from_engine(engine, gpu, mean)
        return roofline.token_s > slowest_s, rate * roofline.request_s

    sized = [(engine, *replicas(engine)) for engine in engines]
    sized.sort(key=lambda entry: (entry[1], max(entry[2], 1.0) * entry[0].weight))
    alike = Counter[tuple[str, int]]()  # number of engines so far by kind and number of GPUs
    turns = []
    for engine, _, n in sized:
        alike[engine.gpu, engine.gpus] += 1
        turns.append((alike[engine.gpu, engine.gpus], engine, n))
    return [(engine, n) for _, engine, n in sorted(turns, key=lambda turn: turn[0])]


def _weight(engine: Engine, replicas: int, limits: Limits) -> float:
    return (replicas + limits.spares) * engine.weight


def _fewest(question: Question, engines: Sequence[Engine], limits: Limits, enough: int) -> list[tuple[Engine, int]]:
    """Return the lower end of the range: the fewest replicas of each engine that may be the answer."""
    trial = partial(try_share, enough=enough, busiest=False)
    with Workers(question, jobs=1) as workers:
        searched = search(
            workers, engines, limits.most, limits.spares, len(engines), trial=trial, alone=try_some_alone, near=1.0
        )
    return [(entry.engine, entry.replicas) for entry in searched if entry.replicas is not None]


def _most(question: Question, engine: Engine, low: int, limits: Limits, enough: int, may_win: float) -> int:
    """Return the highest number of replicas that the answer may have; it is at least `low`.

    It meets the objectives on all draws or on the busiest stretch, or it is the highest number with a price that may
    still win.
    """
    asked = [on_draw(question, engine, draw) for draw in range(len(question.draws))] or [(question, engine)]
    most = low
    for drawn, drawn_engine in asked:
        search = Bisection(low=most - 1, most=limits.most, start=most)
        while not search.done:
            replicas = search.ask()
            search = search.answered(replicas, try_share(drawn, drawn_engine, replicas, enough).met)
        most = search.high or limits.most
    price = engine.weight
    worth = int(may_win / price + 1e-9) - limits.spares if price and question.risk < 1 - LIKELY else low
    steps = max(low // 8, 1) - 1 if most > low else 0  # `most_worth` adds replicas in these steps
    return min(max(most + steps, worth), limits.most)


def try_share(question: Question, engine: Engine, replicas: int, enough: int, busiest: bool = True) -> Trial:
    """Return a trial of `replicas` on the smallest part of them that gets `enough` requests; figures are of the part.

    Only slow steps are tried, because a fleet that meets the objectives with slow steps always meets them. If the whole
    traffic is simulated and `busiest` is not set, the trial is the one that the search will make.
    """
    some, part = _share(question, replicas, enough, busiest)
    if some is question and not busiest:
        return try_fleet(question, engine, replicas)
    cost = question.pricing(engine).at_share(max(1 - question.risk, LIKELY))
    return replace(simulated(some, engine, cost, part), replicas=replicas)


def _share(question: Question, replicas: int, enough: int, busiest: bool) -> tuple[Question, int]:
    """Return the question for a part of a fleet, and the number of replicas of the part.

    The traffic of the question is a stretch of the part's traffic, at a slightly higher or lower rate. Traffic of up to
    `enough` requests stays as it is, on all replicas.
    """
    requests = list(question.workload.requests)
    if len(requests) <= enough:
        return question, replicas
    part = math.ceil(enough * replicas / len(requests))
    if question.loop is not None:  # clients who wait cannot be sent faster, and a stretch would have no warm-up
        return question.for_clients(max(round(clients_of(question.loop) * part / replicas), 1)), part
    places: dict[str | int, int] = {}  # a conversation is taken or left out as a whole
    at = [places.setdefault(request.session or request.id, len(places)) for request in requests]
    taken = [r for r, place in zip(requests, at, strict=True) if _falls_on(place, part, replicas)]
    some = _only(question, _stretch(taken, enough, busiest))
    faster = reshaped(some.workload, rate_scale=1 + _MARGIN if busiest else 1 - _MARGIN)
    return replace(some, workload=faster), part


def _falls_on(place: int, part: int, replicas: int) -> bool:
    """Return True if arrival number `place` goes to the `part` of the replicas when arrivals are spread evenly."""
    return (place + 1) * part // replicas > place * part // replicas


def _stretch(requests: list[WorkloadRequest], most: int, busiest: bool) -> list[WorkloadRequest]:
    """Return the `most` consecutive requests with the most tokens a second, or the stretch with the median number."""
    if len(requests) <= most:
        return requests
    begins = [*range(0, len(requests) - most, max(most // 4, 1)), len(requests) - most]
    before = [0, *accumulate(request.prompt_len + request.output_len for request in requests)]

    def tokens_per_ns(begin: int) -> float:
        last = begin + most
        span_ns = requests[last - 1].arrival_ns - requests[begin].arrival_ns
        return (before[last] - before[begin]) / max(span_ns, 1)

    ranked = sorted(begins, key=tokens_per_ns)
    begin = ranked[-1 if busiest else len(ranked) // 2]
    return requests[begin : begin + most]


def try_some_alone(question: Question, engine: Engine) -> Trial:
    """Return the trial of `try_alone` for the first `_ALONE` requests."""
    if question.loop is not None:
        clients = clients_of(question.loop)
        return try_alone(question.for_clients(max(clients * _ALONE // question.requests, 1)), engine)
    return try_alone(_only(question, list(question.workload.requests)[:_ALONE]), engine)


def _only(question: Question, requests: list[WorkloadRequest]) -> Question:
    return replace(question, workload=only(question.workload, requests), requests=len(requests), draws=())
