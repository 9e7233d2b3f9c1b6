"""The distance of the reader's own plan from measured runs, by its GPU, its model and its load.

The evidence is published runs that were not used to fit the simulator. A run is near if it has the same GPU and model,
and about as many requests at a time in one replica.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

from dashboard.plan_page.words import model_name
from dashboard.trust_page.results import LATENCIES, External, Figure, Source
from planning.plan.document import PlanDocument
from serving.answers.figures import shown_percent, shown_share

_NEAR = 2.0  # maximum factor between the numbers of requests at a time of near runs
_COVERED = 0.8  # share of the measured values inside bands that should contain 0.9 of them
_FAR_PCT = 25.0  # a median error that would change most plans
_AT_A_TIME, _SHARDS, _WEIGHTS = (re.compile(part) for part in (r"_c(\d+)_", r"_tp(\d+)_", r"_(fp\d|int\d)_"))


class Question(NamedTuple):
    """The prediction to be judged; `at_a_time` are the requests in one replica, None if unknown."""

    gpu: str
    model: str
    at_a_time: float | None


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
    def at_a_time(self) -> float | None:
        said = _AT_A_TIME.search(self.name)
        return float(said[1]) if said else None


def question_of(plan: PlanDocument) -> Question | None:
    """Return the question of the recommended fleet; None without one. Requests at a time follow from Little's law."""
    best = plan.recommendation
    if best is None:
        return None
    at_a_time = None
    if plan.requests_per_s and plan.mean_output_tokens and best.tok_s_user:
        at_a_time = plan.requests_per_s / best.replicas * plan.mean_output_tokens / best.tok_s_user
    return Question(plan.gpu_of(best), model_name(str(best.deployment["model"])), at_a_time)


def judged(question: Question, external: External) -> Verdict:
    """Return the verdict whether the prediction can be trusted, by the errors of the nearest runs."""
    asked = f"{question.model} on {question.gpu}"
    on_gpu = list(_runs(case for case in external.cases if case.gpu == question.gpu))
    if not on_gpu:
        why = f"There is no measured run on {question.gpu}, so the error of predictions for this GPU is unknown."
        return Verdict("No", why, {})
    of_model = [run for run in on_gpu if run.is_of(question.model)]
    near = [run for run in of_model if _apart(run, question) <= _NEAR]
    kept = near or of_model or on_gpu
    nearest = min(kept, key=lambda run: _apart(run, question))
    rows = [row for run in kept for row in run.rows]
    covered, worst = sum(row.covered for row in rows) / len(rows), max(_errors(rows).values(), default=math.inf)
    figures = {f"{label} error": shown_percent(error, 0) for label, error in _errors(rows).items()}
    figures |= {"in their 90 % band": shown_share(covered), "measured runs": f"{len(kept):,}"}
    closest = f"The nearest run is {_called(nearest)}."
    if not of_model:
        why = f"{len(on_gpu):,} measured runs are on {question.gpu}, but none is of {question.model}. {closest}"
        return Verdict("Partly", why, figures)
    load = "" if question.at_a_time is None else f" with about {question.at_a_time:,.0f} requests at a time per replica"
    if not near:
        return Verdict(
            "Partly", f"{len(of_model):,} measured runs are of {asked}, but none is{load}. {closest}", figures
        )
    why = f"{len(near):,} measured runs are of {asked}{load}. {closest}"
    if covered >= _COVERED and worst <= _FAR_PCT:
        return Verdict("Yes", why, figures)
    return Verdict(
        "Partly" if covered >= _COVERED else "No", f"{why} The predictions of these runs have large errors.", figures
    )


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
