"""The verdict of a diagnosis: the cause that simulations prove, and the change that mends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokentwin.planning.diagnose.device_symptoms import IDLE, UNBOUNDED
from tokentwin.planning.diagnose.document import LEAST, OVERLOAD, Counterfactual, DiagnosisDocument, Symptom
from tokentwin.planning.diagnose.simulated_symptoms import GOOD_BENCHMARK, NO_HELP
from tokentwin.serving.answers.figures import shown_change, shown_number, shown_share, shown_time
from tokentwin.serving.metrics import metric
from tokentwin.serving.version import __version__
from tokentwin.traces.metrics.saturation import FEWEST

_NO_TROUBLE = (*IDLE, GOOD_BENCHMARK, NO_HELP)  # symptoms that make no request of the run wait
_WORK = ("prompts take the device", "communication", "launch-bound steps", "KV reads")  # symptoms of healthy runs, too
_TRADE = 0.25  # a setting that makes one latency longer by this share is a trade-off, and the present one no mistake

Facts = dict[str, Any]  # fields of a `DiagnosisDocument`, without those that follow


def concluded(facts: Facts) -> DiagnosisDocument:
    """Return the document of `facts`, with the fields that follow from them."""
    known = DiagnosisDocument.model_validate({"version": __version__, "verdict": "", "twin_error": None, **facts})
    if known.counterfactuals:
        known = known.model_copy(update={"symptoms": _tested(known)})
    first = next(iter(known.tried), None)
    cause = first if first and first.gain(known.metric) >= LEAST else None
    follows = {
        "cause": cause and cause.name,
        "kind": cause.kind if cause and troubled(known) else None,
        "twin_error": _twin_error(known),
        "verdict": _verdict(known, cause),
    }
    return DiagnosisDocument.model_validate({**vars(known), **follows})


def troubled(known: DiagnosisDocument) -> bool:
    """Return True if something is wrong: there are enough requests to tell, and a symptom that makes requests wait.

    Large parts of the time, and long gaps between tokens without a bound, are wrong only if a setting would cure them.
    """
    if known.requests < FEWEST:
        return False
    trouble = [s for s in known.symptoms if s.name not in _NO_TROUBLE and not s.refuted]
    first = next(iter(known.tried), None)
    if first is not None and first.kind == "policy" and min(map(first.gain, first.bought)) > -_TRADE:
        return bool(trouble)
    return any(symptom.name not in _WORK and (symptom.name, symptom.metric) != UNBOUNDED for symptom in trouble)


def _tested(known: DiagnosisDocument) -> Sequence[Symptom]:
    """Return the symptoms with what the simulations say about them; those that are no cause come last."""
    tested = [
        _overload_tested(known, symptom) if symptom.name == OVERLOAD else _lift_tested(known, symptom)
        for symptom in known.symptoms
    ]
    return sorted(tested, key=lambda symptom: symptom.refuted)


def _overload_tested(known: DiagnosisDocument, symptom: Symptom) -> Symptom:
    if known.sheds:
        return symptom
    if known.served_rate is None:
        text = "the run is too short to tell, because its backlog grows as much on more replicas"
        return symptom.model_copy(update={"outcome": text, "refuted": True})
    return symptom.model_copy(update={"outcome": f"{shown_number(known.served_rate)} requests/s can be served"})


def _lift_tested(known: DiagnosisDocument, symptom: Symptom) -> Symptom:
    """Return the symptom with the gain of the best of its lifts, in the judged latency or in the symptom's own."""
    names = {known.metric, symptom.metric} if symptom.metric in known.simulated_p99 else {known.metric}
    gains = [(c.gain(name), c.name, name) for c in known.tried if c.name in symptom.lifts for name in sorted(names)]
    if not gains:
        return symptom
    gain, lift, name = max(gains)
    what = "lost requests" if known.sheds and name == known.metric else f"p99 of {metric(name).label}"
    text = f"{what} {shown_change(-100 * gain, 0)} with {lift}"
    return symptom.model_copy(update={"outcome": text, "refuted": gain < LEAST})


def _twin_error(known: DiagnosisDocument) -> float | None:
    if known.sheds:
        real, simulated = (1 - (share or 0.0) for share in (known.recorded_finished, known.simulated_finished))
    elif known.simulated_p99:
        real, simulated = (p99[known.metric] or 0.0 for p99 in (known.recorded_p99, known.simulated_p99))
    else:
        return None
    return simulated / real - 1 if real > 0 else None


def _verdict(known: DiagnosisDocument, cause: Counterfactual | None) -> str:
    """Return the cause, or that nothing is wrong, and the change that helps most."""
    names = [f"{symptom.name}: {symptom.evidence}" for symptom in known.symptoms if not symptom.refuted]
    if not known.counterfactuals and any(symptom.name not in _NO_TROUBLE for symptom in known.symptoms):
        return f"symptoms only, without a cost model: {names[0]}"
    if known.requests < FEWEST:
        wrong = f"too few requests for a verdict ({known.requests} of at least {FEWEST})"
    elif not troubled(known):
        wrong = f"no problem found{f' ({names[0]})' if names else ''}"
    elif cause is None:
        what = "lets a tenth of the lost requests finish" if known.sheds else f"lowers the {_judged(known)} by a tenth"
        return f"unexplained: no lifted constraint {what}; {names[0]}"
    elif known.arrival_rate is not None and known.served_rate is not None:
        arrive, served = shown_number(known.arrival_rate), shown_number(known.served_rate)
        wrong = f"a {cause.kind} problem: {arrive} requests/s arrive, {served} can be served; {cause.cause}"
    else:
        wrong = f"a {cause.kind} problem: {cause.cause}"
        if known.best is None or known.best.name != cause.name:
            wrong += f" (with {cause.name} {_change(known, cause)})"
    best, in_trouble = known.best, cause is not None and troubled(known)
    if best is None:
        return f"{wrong}; no change that was tried helps by a tenth" if in_trouble else wrong
    return f"{wrong}; {'' if in_trouble else 'still, '}with {best.name} {_left(known, best)}{_cost(known, best)}"


def _judged(known: DiagnosisDocument) -> str:
    return f"p99 of {metric(known.metric).label}"


def _change(known: DiagnosisDocument, tried: Counterfactual) -> str:
    gain = tried.gain(known.metric)
    if known.sheds:
        return f"{shown_share(gain)} of the lost requests finish"
    return f"the {_judged(known)} changes by {shown_change(-100 * gain, 0)}"


def _cost(known: DiagnosisDocument, change: Counterfactual) -> str:
    more = (change.gpus or 0) - known.gpus
    return f", on {abs(more):,} {'more' if more > 0 else 'fewer'} GPU{'s' * (abs(more) > 1)}" if more else ""


def _left(known: DiagnosisDocument, tried: Counterfactual) -> str:
    if known.sheds and tried.finished is not None:
        before, after = shown_share(known.simulated_finished or 0.0, 1), shown_share(tried.finished, 1)
        return f"{after} of the requests would finish instead of {before}"
    was, left = known.simulated_p99[known.metric], tried.p99[known.metric]
    lost = {name: tried.gain(name) for name in tried.bought if tried.gain(name) < -LEAST}
    assert was is not None and left is not None  # a change with a gain leaves a number
    return (
        f"{'the run keeps up, and ' if tried.mends else ''}the {_judged(known)} would be {shown_time(left)} instead of "
        f"{shown_time(was)} ({shown_change(-100 * tried.gain(known.metric), 0)})"
        + "".join(f", and the p99 of {metric(m).label} {shown_change(-100 * s, 0)}" for m, s in lost.items())
    )
