"""The verdict of a diagnosis: the cause of the latency, in words for an engineer and for a manager."""

from __future__ import annotations

from typing import Any

from tokentwin.planning.diagnose.constraint_lifts import LIFTS, NO_PARTS, QUESTIONS
from tokentwin.planning.diagnose.device_symptoms import IDLE, UNBOUNDED
from tokentwin.planning.diagnose.document import LEAST, Counterfactual, DiagnosisDocument, Question
from tokentwin.planning.diagnose.simulated_symptoms import GOOD_BENCHMARK, NO_HELP
from tokentwin.serving.answers.figures import shown_change, shown_share, shown_time
from tokentwin.serving.metrics import metric
from tokentwin.serving.version import __version__
from tokentwin.traces.metrics.saturation import FEWEST

_NO_TROUBLE = (*IDLE, GOOD_BENCHMARK, NO_HELP)  # symptoms that make no request of the run wait
_WORK = ("prompts take the device", "communication", "launch-bound steps", "KV reads")  # symptoms of healthy runs, too
_TRADE = 0.25  # a setting that makes one latency longer by this share is a trade-off, and the present one no mistake
_ASK_FOR_GOOD = ("kernels", "scheduler", "capacity")  # questions for which yes is the good answer

Facts = dict[str, Any]  # fields of a `DiagnosisDocument`, without those that follow


def concluded(facts: Facts) -> DiagnosisDocument:
    """Return the document of `facts`, with the fields that follow from them."""
    known = DiagnosisDocument.model_validate({"version": __version__, "verdict": "", "twin_error": None, **facts})
    first = next(iter(known.tried), None)
    cause = first if first and first.gain(known.metric) >= LEAST else None
    follows = {
        "cause": cause and cause.name,
        "kind": cause.kind if cause and troubled(known) else None,
        "twin_error": _twin_error(known),
        "questions": [_answered(known, about) for about in QUESTIONS] if known.counterfactuals else [],
        "verdict": _verdict(known, cause),
    }
    follows["summary"] = _summary(known, cause) if cause else follows["verdict"]
    return DiagnosisDocument.model_validate({**vars(known), **follows})


def troubled(known: DiagnosisDocument) -> bool:
    """Return True if something is wrong: there are enough requests to tell, and a symptom that makes requests wait.

    Large parts of the time, and long gaps between tokens without a bound, are wrong only if a setting would cure them.
    """
    if known.requests < FEWEST:
        return False
    trouble = [symptom for symptom in known.symptoms if symptom.name not in _NO_TROUBLE]
    first = next(iter(known.tried), None)
    if first is not None and first.kind == "policy" and min(map(first.gain, first.bought)) > -_TRADE:
        return bool(trouble)
    return any(symptom.name not in _WORK and (symptom.name, symptom.metric) != UNBOUNDED for symptom in trouble)


def _twin_error(known: DiagnosisDocument) -> float | None:
    if known.sheds:
        real, simulated = (1 - (share or 0.0) for share in (known.recorded_finished, known.simulated_finished))
    elif known.simulated_p99:
        real, simulated = (p99[known.metric] or 0.0 for p99 in (known.recorded_p99, known.simulated_p99))
    else:
        return None
    return simulated / real - 1 if real > 0 else None


def _answered(known: DiagnosisDocument, about: str) -> Question:
    """Return the answer to a question, from the lift with the largest gain.

    If the gain is small and some lifts were not tried, the answer is not known.
    """
    asked = [c for c in known.counterfactuals if LIFTS[c.name].question == about]
    untried = ", ".join(c.name for c in asked if c.skipped == NO_PARTS)
    most = max((c for c in asked if not c.skipped), key=lambda c: c.gain(known.metric), default=None)
    gain = most.gain(known.metric) if most else 0.0
    if most is None or (untried and gain < LEAST):
        return Question(question=QUESTIONS[about], yes=None, untried=untried)
    return Question(
        question=QUESTIONS[about], yes=(gain >= LEAST) != (about in _ASK_FOR_GOOD), lift=most.name, gain=gain
    )


def _verdict(known: DiagnosisDocument, cause: Counterfactual | None) -> str:
    """Return the verdict for an engineer."""
    if not known.counterfactuals:
        if not known.symptoms:
            return "no symptom found"
        return f"symptoms only, without a cost model: {known.symptoms[0].name} ({known.symptoms[0].evidence})"
    if cause is not None:
        return f"{_judged(known, cause)}: {cause.cause}; with {cause.name} {_left(known, cause)}"
    if known.sheds:
        return (
            "unexplained: with one constraint lifted, less than a tenth of the unfinished requests would finish; "
            "their column `reason` says why they did not finish"
        )
    return (
        "neither a capacity nor a policy problem: no lifted constraint reduces the p99 of "
        f"{metric(known.metric).label} by a tenth"
    )


def _summary(known: DiagnosisDocument, cause: Counterfactual) -> str:
    """Return the verdict for the person who decides on purchases: the best change, and what is wrong."""
    wrong = f"{cause.cause} ({cause.lifecycle})"
    best = known.best
    if best is None:
        return f"{wrong}; no change that was tried improves it by a tenth"
    more = (best.gpus or 0) - known.gpus
    cost = f", on {abs(more)} {'more' if more > 0 else 'fewer'} GPU{'s' * (abs(more) > 1)}" if more else ""
    return f"with {best.name} {_left(known, best)}{cost}; the cause is {wrong}"


def _judged(known: DiagnosisDocument, cause: Counterfactual) -> str:
    if troubled(known):
        return f"a {cause.kind} problem"
    would = f"what would still {'let more requests finish' if known.sheds else 'lower the p99'}"
    if known.requests < FEWEST:
        return f"too few requests for a verdict ({known.requests} of at least {FEWEST}); {would}"
    only = " and ".join(symptom.name for symptom in known.symptoms)
    return f"no symptom {f'but {only}' if only else 'found'}; {would}"


def _left(known: DiagnosisDocument, tried: Counterfactual) -> str:
    if known.sheds and tried.finished is not None:
        before, after = shown_share(known.simulated_finished or 0.0, 1), shown_share(tried.finished, 1)
        return f"{after} of the requests would finish instead of {before}"
    was, left = known.simulated_p99[known.metric], tried.p99[known.metric]
    share = -100 * tried.gain(known.metric)
    lost = {name: tried.gain(name) for name in tried.bought if tried.gain(name) < -LEAST}
    assert was is not None and left is not None  # a lift with a gain leaves a number
    return (
        f"the p99 of {metric(known.metric).label} would be {shown_time(left)} instead of {shown_time(was)} "
        f"({shown_change(share, 0)})"
        + "".join(f", and the p99 of {metric(m).label} {shown_change(-100 * s, 0)}" for m, s in lost.items())
    )
