"""Tests of claims, and the value of a setting from which a change begins to pay."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache

from lab.claims.claim import BreakEven, Claim, Expected, Experiment
from lab.claims.figures import Known, central, measured
from lab.claims.terms import terms_of
from tokentwin.planning.claims.document import CheckedCase, CheckedClaim, ClaimsDocument, TriedOnEngine, verdict_of
from tokentwin.planning.deployments import overridden
from tokentwin.planning.progress import Tell, quiet
from tokentwin.serving.deployments.config import parse
from tokentwin.serving.errors import UserError
from tokentwin.serving.front_door import FrontDoor

Engine = Callable[[Claim], TriedOnEngine | None]


def check(
    claims: Mapping[str, Claim],
    tell: Tell = quiet,
    engine: Engine | None = None,
    front_door: FrontDoor | None = None,
) -> ClaimsDocument:
    """Check every case of every claim, and on the real engine if one is given.

    If a claim shows the parts of E2E, the times around the engine are those of `front_door` or, by default, those
    fitted to measured servers. Raises a UserError that names the claim if its experiment cannot be run.
    """
    total = sum(len(claim.cases) for claim in claims.values())
    done, checked = 0, []
    for name, claim in claims.items():
        cases: list[CheckedCase] = []
        known: Known = {}
        for case, experiment in claim.experiments():
            tell(name, done / total)
            try:
                value = measured(experiment, known)
            except UserError as error:
                raise UserError(f"claim {name}, when {case.when}: {error.field}", error.value, error.remedy) from None
            terms = terms_of(experiment, front_door) if claim.terms else ()
            judged = {"unit": claim.expects.unit, "holds": claim.expects.judge(value.low, value.high), "terms": terms}
            cases.append(CheckedCase.model_validate({"claim": name, "when": case.when, **judged, **value._asdict()}))
            done += 1
        tried = None if engine is None else engine(claim)
        turns = ""
        if claim.break_even is not None:
            turns = break_even(parse(Experiment, claim.experiment, "experiment"), claim.break_even, claim.expects)
        checked.append(
            CheckedClaim(
                name=name,
                claim=claim.claim,
                means=claim.means,
                expected=str(claim.expects),
                least=claim.expects.least,
                most=claim.expects.most,
                verdict=verdict_of(tuple(cases)),
                break_even=turns,
                learnt=claim.learnt,
                engine=tried,
                untried="" if tried is not None else claim.not_on_engine or _untried(claim, engine),
                cases=tuple(cases),
            )
        )
    return ClaimsDocument(claims=tuple(checked))


def _untried(claim: Claim, engine: Engine | None) -> str:
    """Return why a claim was not tried on the real engine; empty if the claim has no experiment on a GPU."""
    if claim.engine is None or not claim.engine.gpu:
        return ""
    return f"it needs a GPU, and {'no GPU has run it yet' if engine is None else 'this machine has none'}"


_HALVINGS = 5  # number of times that the searched range is halved
_WIDE = 8  # ratio of the range's ends; a range that is at least so wide is halved geometrically


def break_even(experiment: Experiment, search: BreakEven, expects: Expected) -> str:
    """Return sentences that say for which values the change pays and the claim holds, at the central step times.

    The figure is assumed to be monotonic over the searched range.
    """
    known: Known = {}

    @cache
    def figure(value: float) -> float:
        moved = {search.path: round(value) if search.whole else value}
        sides = [
            parse(Experiment, overridden(side.as_json(), moved), "experiment") if search.of in ("both", name) else side
            for name, side in zip(("baseline", "change"), experiment.sides, strict=False)
        ]
        return central(sides, known)

    def place_of(bound: float) -> float:
        low, high = search.least, search.most
        wide = low > 0 and high >= _WIDE * low
        begins = figure(low) >= bound
        for _ in range(_HALVINGS):
            middle = math.sqrt(low * high) if wide else (low + high) / 2
            low, high = (middle, high) if (figure(middle) >= bound) == begins else (low, middle)
        return math.sqrt(low * high) if wide else (low + high) / 2

    def where(least: float, most: float) -> str:
        """Return the values of the setting at which the figure lies between the bounds."""
        first, last = figure(search.least), figure(search.most)
        enters, leaves = (least, most) if first <= last else (most, least)
        up = 1 if first <= last else -1  # 1 if the figure rises with the setting, else -1
        if up * last < up * enters or up * first > up * leaves:
            return "nowhere"
        start = place_of(enters) if up * first < up * enters else None
        stop = place_of(leaves) if up * last > up * leaves else None
        if start is None:
            return "everywhere" if stop is None else f"below about {_short(stop)}"
        return f"above about {_short(start)}" if stop is None else f"from about {_short(start)} to {_short(stop)}"

    said = f"From {search.least:,g} to {search.most:,g} {search.what}:"
    least = -math.inf if expects.least is None else expects.least
    most = math.inf if expects.most is None else expects.most
    if experiment.baseline is not None and least > 1:
        said += f" it pays {where(1.0, math.inf)};"
    return f"{said} the claim holds {where(least, most)}."


def _short(value: float) -> str:
    """Return the number with two digits."""
    return f"{float(f'{value:.2g}'):,g}"
