"""The distance of the reader's own plan from measured runs.

The evidence is published runs that were not used to fit the simulator. The nearest runs have the same GPU and, as far
as such runs exist, the same model, weights, tensor parallelism, and about as many requests at a time in one replica.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any, NamedTuple

from pydantic import ValidationError

from dashboard.plan_page.words import model_name
from dashboard.trust_page.results import LATENCIES, External, Figure, Source
from planning.plan.document import PlanDocument
from planning.plan.objectives import Objective, parse_objectives
from serving.answers.figures import shown_percent, shown_share
from serving.deployments.config import Deployment
from serving.deployments.model_catalogue import find_model
from serving.deployments.weight_types import weights_dtype
from serving.errors import UserError
from serving.metrics import metric

_NEAR = 2.0  # maximum factor between the numbers of requests at a time of near runs
_COVERED = 0.8  # share of the measured values inside bands that should contain 0.9 of them
_FAR_PCT = 25.0  # a median error that would change most plans
_PUBLISHED = {"bfloat16": "bf16", "float16": "bf16", "fp8_block": "fp8", "mxfp4": "fp4", "nvfp4": "fp4"}
_AT_A_TIME, _SHARDS, _WEIGHTS = (re.compile(part) for part in (r"_c(\d+)_", r"_tp(\d+)_", r"_(fp\d|int\d)_"))


class Question(NamedTuple):
    """The prediction to be judged.

    Attributes:
        at_a_time: number of requests in one replica; None if unknown
        weights: type of the weights, as in the names of published runs (`fp8`); `bf16` for 16 bits; empty if unknown
        shards: tensor parallel size; 0 if unknown
        figures: the figures that the SLOs bound, such as `ttft_ms.p99`
        engine: the engine, such as `vLLM`; empty for any
    """

    gpu: str
    model: str
    at_a_time: float | None
    weights: str = ""
    shards: int = 0
    figures: tuple[str, ...] = ()
    engine: str = ""


class Verdict(NamedTuple):
    """An answer, `Yes`, `Partly` or `No`; the reason in a sentence; and figures of the nearest runs by name."""

    answer: str
    why: str
    figures: dict[str, str]


class _Run(NamedTuple):
    source: Source
    name: str
    rows: list[Figure]

    def is_of(self, model: str) -> bool:
        return bool(_letters(model)) and _letters(model) in _letters(self.source.name + self.name)

    @property
    def engine(self) -> str:
        return engine_of(self.source)

    @property
    def at_a_time(self) -> float | None:
        said = _AT_A_TIME.search(self.name)
        return float(said[1]) if said else None

    @property
    def weights(self) -> str:
        said = _WEIGHTS.search(self.name)
        return said[1] if said else "bf16"

    @property
    def shards(self) -> int:
        said = _SHARDS.search(self.name)
        return int(said[1]) if said else 1


def question_of(plan: PlanDocument) -> Question | None:
    """Return the question of the recommended fleet; None without one. Requests at a time follow from Little's law."""
    best = plan.recommendation
    if best is None:
        return None
    at_a_time = None
    if plan.requests_per_s and plan.mean_output_tokens and best.tok_s_user:
        at_a_time = plan.requests_per_s / best.replicas * plan.mean_output_tokens / best.tok_s_user
    model, shards = model_name(str(best.deployment["model"])), int(best.deployment["tensor_parallel_size"])
    figures = tuple(figure for slo in parse_objectives(plan.objectives).slos for figure in _bounded(slo))
    return Question(plan.gpu_of(best), model, at_a_time, _weights(best.deployment), shards, figures)


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
    covered, worst = sum(row.covered for row in rows) / len(rows), max(_errors(rows).values(), default=math.inf)
    figures = {f"{label} error": shown_percent(error, 0) for label, error in _errors(rows).items()}
    figures |= {"in their 90 % band": shown_share(covered), "measured runs": f"{len(kept):,}"}
    runs = "1 measured run is" if len(kept) == 1 else f"{len(kept):,} measured runs are"
    why = f"{runs} {', '.join([f'on {question.gpu}', *alike])}"
    why += f", but none {' or '.join(lacking)}." if lacking else "."
    why += f" The nearest run is {_called(min(kept, key=lambda run: _apart(run, question)))}."
    if covered >= _COVERED and worst <= _FAR_PCT:
        return Verdict("Partly" if lacking else "Yes", why, figures)
    answer = "Partly" if lacking or covered >= _COVERED else "No"
    return Verdict(answer, f"{why} The predictions of these runs have large errors.", figures)


def _respects(question: Question) -> Iterable[tuple[str, Callable[[_Run], bool]]]:
    """Yield in what respect a run can be like the plan, in words, and whether it is; the most important comes first."""
    yield f"of {question.model}", lambda run: run.is_of(question.model)
    if question.engine:
        yield f"by {question.engine}", lambda run: run.engine == question.engine
    if question.weights:
        yield f"with weights in {question.weights.upper()}", lambda run: run.weights == question.weights
    if question.shards:
        yield f"with TP{question.shards}", lambda run: run.shards == question.shards
    if question.at_a_time is not None:
        load = f"with about {question.at_a_time:,.0f} requests at a time per replica"
        yield load, lambda run: _apart(run, question) <= _NEAR


def _bounded(slo: Objective) -> Iterable[str]:
    """Yield the figures that an objective bounds; an attainment bounds the percentile of its share."""
    for name, _ in slo.bounds:
        yield f"{name}.p{100 * float(slo.share):g}"


def _named(figure: str) -> str:
    """Return `TTFT p99` for `ttft_ms.p99`."""
    name, _, statistic = figure.partition(".")
    return f"{metric(name).label} {statistic}"


def _weights(deployment: Mapping[str, Any]) -> str:
    """Return the type of the weights as published runs are named: `bf16`, `fp8`, `fp4`, `int4`; empty if unknown."""
    try:
        dtype = weights_dtype(find_model(str(deployment["model"])), Deployment.model_validate(deployment))
    except (UserError, ValidationError):
        return ""
    return _PUBLISHED.get(dtype, dtype)


def _runs(cases: Iterable[Source]) -> Iterable[_Run]:
    for case in cases:
        for name in dict.fromkeys(row.run for row in case.rows):
            yield _Run(case, name, [row for row in case.rows if row.run == name])


def _errors(rows: list[Figure]) -> dict[str, float]:
    """Return the median absolute errors of blind predictions in percent, by latency."""
    by_label = {
        label: [abs(row.blind_error_pct) for row in rows if row.figure.startswith(name)]
        for name, label in LATENCIES.items()
    }
    return {label: median(errors) for label, errors in by_label.items() if errors}


def _apart(run: _Run, question: Question) -> float:
    """Return the factor between the numbers of requests at a time; infinite if either is unknown."""
    if run.at_a_time is None or not question.at_a_time:
        return math.inf
    return max(run.at_a_time / question.at_a_time, question.at_a_time / run.at_a_time)


def _called(run: _Run) -> str:
    shards, weights = _SHARDS.search(run.name), _WEIGHTS.search(run.name)
    parts = [run.source.title if run.at_a_time is None else f"one of {run.source.engine.partition(',')[0]}"]
    parts += [f"TP{shards[1]}"] if shards else []
    parts += [f"weights in {weights[1].upper()}"] if weights else []
    parts += [f"{run.at_a_time:.0f} requests at a time"] if run.at_a_time else []
    return ", ".join(parts)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
