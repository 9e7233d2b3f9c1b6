"""The answer to a comparison: its `ComparisonDocument`, made of what was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from planning.compare.document import (
    Cdfs,
    Compared,
    ComparisonDocument,
    Curve,
    Curves,
    RanDeployment,
    Ranked,
    Row,
    Side,
    Tally,
    Tenant,
    Units,
)
from planning.version import __version__

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from calibration.validation.disturbance import Disturbance
    from planning.compare import comparison as found
    from planning.compare.paired_runs import PairedRuns
    from planning.priced_scenario import PricedScenario
    from traces.recording import Recording

_POINTS = 240  # of a distribution that is drawn


def comparison_document(
    of: Compared,
    inputs: Mapping[str, Any],
    disturbance: Disturbance | None = None,
    simulated: Compared | None = None,
    ranked: Sequence[found.Ranked] = (),
    same_weather: Compared | None = None,
) -> ComparisonDocument:
    """`inputs` say how to get it again: `{"command": ...}`, or the inputs of the page.

    Of real runs there is a `disturbance` and, where they were `simulated`, too, whether its claims hold, row by row,
    and what came out in the `same_weather`, if that is known.
    """
    return ComparisonDocument(
        **dict(of),
        disturbed=disturbance is not None and disturbance.disturbed,
        disturbance=disturbance.evidence if disturbance is not None else "",
        simulated=simulated,
        same_weather=same_weather,
        ranking=None if simulated is None else tuple(Ranked.model_validate(r, from_attributes=True) for r in ranked),
        version=__version__,
        inputs=dict(inputs),
    )


def compared(pairs: PairedRuns, comparison: found.Comparison, sides: Sequence[Side]) -> Compared:
    """What was found of `pairs`; `sides` are what ran: a `simulated_side` or a `recorded_side` each."""
    a, b = sides
    return Compared(
        verdict=comparison.verdict(),
        difference=bool(comparison.claims),
        requests=comparison.requests,
        runs=comparison.runs,
        units=Units(of=comparison.unit_is, count=comparison.units, carry_over=comparison.carry_over),
        rows=tuple(Row.model_validate(row, from_attributes=True) for row in comparison.rows),
        threshold=comparison.threshold,
        tallies=tuple(Tally.model_validate(tally, from_attributes=True) for tally in comparison.tallies),
        cdfs=Cdfs(
            **{
                name: Curves(**{latency: _curve(side.values(latency)) for latency in Curves.model_fields})
                for name, side in (("a", pairs.a), ("b", pairs.b))
            }
        ),
        tenants=_tenants(pairs),
        a=a,
        b=b,
    )


def simulated_side(scenario: PricedScenario, calibration: str) -> Side:
    """How far to trust its step times (as far as those of its least certain pool), what timed them, and what ran.

    Read it after the run: how far to trust the times depends on which steps there were.
    """
    mark, reason = scenario.provenance()
    return Side(
        mark=mark.name.lower(),
        reason=reason,
        calibration=calibration,
        deployment=RanDeployment(**scenario.deployment.model_dump(mode="json")),
        replicas=scenario.engines,
        router=scenario.routes_by,
    )


def recorded_side(recordings: Sequence[Recording], found: Disturbance | None) -> Side:
    """Which clock ran it, how often, what ran, and how far to trust it; `found` is of both sides."""
    from calibration.provenance import UNKNOWN, Provenance, of_run, weakest
    from calibration.validation.decision_replay import recorded_deployment

    provenance = weakest((of_run(recording.run) for recording in recordings), "recordings")
    if found is not None and found.disturbed:
        provenance = Provenance(UNKNOWN, f"{provenance.reason}, on a machine that was disturbed")
    return Side(
        clock=recordings[0].run["clock"],
        runs=len(recordings),
        deployment=RanDeployment(**recorded_deployment(recordings[0]).model_dump(mode="json")),
        mark=provenance.mark,
        reason=provenance.reason,
    )


def _curve(values: NDArray[Any]) -> Curve:
    from traces.ecdf import ecdf

    x, y = ecdf(values, _POINTS)
    return Curve(x=tuple(float(f"{v:.6g}") for v in x), y=tuple(round(float(v), 3) for v in y))


def _tenants(pairs: PairedRuns) -> tuple[Tenant, ...]:
    import numpy as np

    labels = pairs.a.labels("tenant")
    names = np.unique(labels)
    if len(names) < 2:
        return ()
    served = [side.served / max(side.served.sum(), 1) for side in (pairs.a, pairs.b)]
    return tuple(
        Tenant(
            tenant=str(name) or "(none)",
            requests=100 * float((labels == name).mean()),
            **{key: 100 * float(share[labels == name].sum()) for key, share in zip("ab", served, strict=True)},
        )
        for name in names
    )
