"""The distance of the reader's own plan from measured runs.

The evidence is published runs that were not used to fit the simulator. The nearest runs have the same GPU and, as far
as such runs exist, the same model, engine, precisions, tensor parallelism and kind of load, and about as many requests
at a time in one replica.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from pydantic import ValidationError

from tokentwin.calibration.validation.external.served import precisions
from tokentwin.dashboard.plan_page.words import model_name
from tokentwin.dashboard.trust_page.results import External, Figure, Served, Source, covered, median_errors_pct
from tokentwin.planning.plan.document import PlanDocument
from tokentwin.planning.plan.objectives import Objective, parse_objectives
from tokentwin.serving.answers.figures import shown_percent, shown_share
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.errors import UserError
from tokentwin.serving.metrics import metric

_NEAR = 2.0  # maximum factor between the numbers of requests at a time of near runs
_COVERED = 0.8  # share of the measured values inside bands that should contain 0.9 of them
_FAR_PCT = 25.0  # a median error that would change most plans
LOADS = {False: "requests that come at a rate", True: "a fixed number of requests in flight"}  # by `closed`


class Question(NamedTuple):
    """The prediction to be judged.

    Attributes:
        at_a_time: number of requests in one replica; None if unknown
        weights, kv_cache: precision, `bf16` for 16 bits; empty if unknown
        shards: tensor parallel size; 0 if unknown
        figures: the figures that the SLOs bound, such as `ttft_ms.p99`
        engine: the engine, such as `vLLM`; empty for any
        closed: True for a fixed number of requests in flight, False for requests that come at a rate; None for either
    """

    gpu: str
    model: str
    at_a_time: float | None
    weights: str = ""
    shards: int = 0
    figures: tuple[str, ...] = ()
    engine: str = ""
    kv_cache: str = ""
    closed: bool | None = None


class Verdict(NamedTuple):
    """An answer, `Yes`, `Partly` or `No`; the reason in a sentence; and figures of the nearest runs by name."""

    answer: str
    why: str
    figures: dict[str, str]

    @property
    def sentence(self) -> str:
        """The answer and its figures, or without figures the reason, for pages beside Trust."""
        figures = ", ".join(f"{name} {value}" for name, value in self.figures.items())
        return f"Trust: {self.answer}. {f'The nearest published runs: {figures}.' if figures else self.why}"


class _Run(NamedTuple):
    source: Source
    served: Served
    rows: list[Figure]


def questions(plan: PlanDocument) -> Iterable[Question]:
    """Yield the question of the fleet that is the answer, or of each kind of engine in it.

    Requests at a time follow from Little's law; in a mixed fleet they are unknown.
    """
    best, mix = plan.recommendation, plan.winning_mix
    if mix is not None:
        for engine in dict.fromkeys(pool.engine for pool in mix.pools if pool.engine in plan.candidates):
            yield _question(plan, plan.candidates[engine].gpu, plan.candidates[engine].deployment, None)
        return
    if best is None:
        return
    at_a_time = None
    if plan.requests_per_s and plan.mean_output_tokens and best.tok_s_user:
        at_a_time = plan.requests_per_s / best.replicas * plan.mean_output_tokens / best.tok_s_user
    elif plan.clients:
        at_a_time = plan.clients / best.replicas
    yield _question(plan, plan.gpu_of(best), best.deployment, at_a_time)


def _question(plan: PlanDocument, gpu: str, deployment: Mapping[str, Any], at_a_time: float | None) -> Question:
    weights, kv_cache = _precisions(deployment)
    slos: Iterable[Objective] = ()
    with suppress(UserError):  # a saved answer may hold any text
        slos = parse_objectives(plan.objectives).slos
    return Question(
        gpu=gpu,
        model=model_name(str(deployment["model"])),
        at_a_time=at_a_time,
        weights=weights,
        shards=int(deployment["tensor_parallel_size"]),
        figures=tuple(figure for slo in slos for figure in _bounded(slo)),
        kv_cache=kv_cache,
        closed=plan.clients is not None,
    )


def engine_of(source: Source) -> str:
    """Return the name of the engine of a published run, without its version."""
    return source.engine.split()[0].rstrip(",")


def judged(question: Question, external: External) -> Verdict:
    """Return the verdict whether the prediction can be trusted, by the errors of the nearest runs.

    `Yes` needs runs that are alike in every respect, that state the figures which the SLOs bound, and small errors.
    """
    kept = list(_runs(case for case in external.cases if case.gpu == question.gpu))
    if not kept:
        why = f"There is no measured run on {question.gpu}, so the error of predictions for this GPU is unknown."
        return Verdict("No", why, {})
    alike, lacking = [], []
    for respect, is_alike in _respects(question):
        nearer = [run for run in kept if is_alike(run)]
        kept = nearer or kept
        if nearer:
            alike.append(respect)
        else:
            lacking.append(f"is {respect}")
    rows = [row for run in kept for row in run.rows]
    stated = {row.figure for row in rows}
    if unstated := [_named(figure) for figure in question.figures if figure not in stated]:
        lacking.append(f"states {' or '.join(unstated)}")
    errors, inside = median_errors_pct(rows), covered(rows) / len(rows)
    figures = {f"{label} error": shown_percent(error, 0) for label, error in errors.items()}
    figures |= {"in their 90 % band": shown_share(inside), "measured runs": f"{len(kept):,}"}
    runs = "1 measured run is" if len(kept) == 1 else f"{len(kept):,} measured runs are"
    why = f"{runs} {', '.join([f'on {question.gpu}', *alike])}"
    why += f", but {', '.join(f'none {what}' for what in lacking)}." if lacking else "."
    why += f" The nearest run is {_called(min(kept, key=lambda run: _apart(run, question)))}."
    if inside >= _COVERED and max(errors.values(), default=math.inf) <= _FAR_PCT:
        return Verdict("Partly" if lacking else "Yes", why, figures)
    answer = "Partly" if lacking or inside >= _COVERED else "No"
    return Verdict(answer, f"{why} The predictions of these runs have large errors.", figures)


def _respects(question: Question) -> Iterable[tuple[str, Callable[[_Run], bool]]]:
    """Yield in what respect a run can be like the plan, in words, and whether it is; the most important comes first."""
    yield f"of {question.model}", lambda run: run.served.model == question.model
    if question.engine:
        yield f"by {question.engine}", lambda run: engine_of(run.source) == question.engine
    if question.weights:
        yield f"with weights in {question.weights.upper()}", lambda run: run.served.weights == question.weights
    if question.kv_cache:
        yield f"with KV cache in {question.kv_cache.upper()}", lambda run: run.served.kv_cache == question.kv_cache
    if question.shards:
        yield f"with TP{question.shards}", lambda run: run.served.shards == question.shards
    if question.closed is not None:
        yield f"with {LOADS[question.closed]}", lambda run: run.served.closed == question.closed
    if question.at_a_time is not None:
        load = f"with about {question.at_a_time:,.0f} requests at a time per replica"
        yield load, lambda run: _apart(run, question) <= _NEAR


def _bounded(slo: Objective) -> Iterable[str]:
    """Yield the figures that an objective bounds; an attainment bounds the percentile of its share."""
    for name, _ in slo.bounds:
        yield f"{name}.{slo.statistic}"


def _named(figure: str) -> str:
    """Return `TTFT p99` for `ttft_ms.p99`."""
    name, _, statistic = figure.partition(".")
    return f"{metric(name).label} {statistic}"


def _precisions(deployment: Mapping[str, Any]) -> tuple[str, str]:
    """Return the precision of weights and KV cache; empty if unknown, as for a pasted model that was deleted."""
    try:
        return precisions(Deployment.model_validate(deployment))
    except (UserError, ValidationError):
        return "", ""


def _runs(cases: Iterable[Source]) -> Iterable[_Run]:
    for case in cases:
        for name in dict.fromkeys(row.run for row in case.rows):
            served = case.served.get(name, _UNSTATED)
            yield _Run(case, served, [row for row in case.rows if row.run == name])


def _apart(run: _Run, question: Question) -> float:
    """Return the factor between the numbers of requests at a time; infinite if either is unknown."""
    there = run.served.at_a_time
    if not there or not question.at_a_time:
        return math.inf
    return max(there / question.at_a_time, question.at_a_time / there)


def _called(run: _Run) -> str:
    served = run.served
    if served is _UNSTATED:
        return run.source.title
    parts = [f"{served.model} by {run.source.engine.partition(',')[0]}", f"TP{served.shards}"]
    parts += [f"weights in {served.weights.upper()}", f"KV cache in {served.kv_cache.upper()}"]
    parts += [LOADS[served.closed]] if served.closed is not None else []
    parts += [f"about {served.at_a_time:,.0f} at a time"] if served.at_a_time else []
    return ", ".join(parts)


_UNSTATED = Served(model="", weights="", kv_cache="", shards=0)
