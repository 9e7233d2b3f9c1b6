"""Tests of claims."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lab.claims.break_even import break_even
from lab.claims.claim import Claim, Experiment
from lab.claims.figures import Known, measured
from lab.claims.terms import terms_of
from planning.claims.document import CheckedCase, CheckedClaim, ClaimsDocument, TriedOnEngine, verdict_of
from planning.progress import Tell, quiet
from serving.deployments.config import parse
from serving.errors import UserError
from serving.front_door import FrontDoor

Engine = Callable[[Claim], TriedOnEngine | None]


def check(
    claims: Mapping[str, Claim],
    tell: Tell = quiet,
    engine: Engine | None = None,
    front_door: FrontDoor | None = None,
) -> ClaimsDocument:
    """Check every case of every claim, and on the real engine if one is given.

    If a claim is about E2E, the times around the engine are those of `front_door`, or as measured servers teach. Raises
    UserError that names the claim whose experiment cannot be made.
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
    """Return why a claim was not tried on the real engine; empty if it has no experiment for it."""
    if claim.engine is None or not claim.engine.gpu:
        return ""
    return f"it needs a GPU, and {'no GPU has run it yet' if engine is None else 'this machine has none'}"
