"""Claims put to the test."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from planning.claims.claim import Claim, Expected
from planning.claims.document import CheckedCase, CheckedClaim, ClaimsDocument, verdict_of
from planning.claims.figures import Measured, measured
from planning.progress import Tell, quiet
from serving.errors import UserError


def check(claims: Mapping[str, Claim], tell: Tell = quiet) -> ClaimsDocument:
    """Every case of every claim. Raises UserError that names the claim whose experiment cannot be made."""
    total = sum(len(claim.cases) for claim in claims.values())
    done, checked = 0, []
    for name, claim in claims.items():
        cases = []
        for case, experiment in claim.experiments():
            tell(name, done / total)
            try:
                value = measured(experiment)
            except UserError as error:
                raise UserError(f"claim {name}, when {case.when}: {error.field}", error.value, error.remedy) from None
            cases.append(_case(name, case.when, value, claim.expects))
            done += 1
        checked.append(
            CheckedClaim(
                name=name,
                claim=claim.claim,
                means=claim.means,
                expected=str(claim.expects),
                verdict=verdict_of(tuple(cases)),
                learnt=claim.learnt,
                cases=tuple(cases),
            )
        )
    return ClaimsDocument(claims=tuple(checked))


def _case(claim: str, when: str, found: Measured, expects: Expected) -> CheckedCase:
    holds = _holds(found.low, found.high, expects)
    return CheckedCase(claim=claim, when=when, unit=expects.unit, holds=holds, **found._asdict())


def _holds(low: float, high: float, expects: Expected) -> Literal["yes", "no", "open"]:
    """Whether all of the interval, nothing of it, or a part lies in the expected range."""
    least = -math.inf if expects.least is None else expects.least
    most = math.inf if expects.most is None else expects.most
    if least <= low and high <= most:
        return "yes"
    return "no" if high < least or low > most else "open"
