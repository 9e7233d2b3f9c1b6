"""Comparisons as jobs: what `tokentwin.jobs` runs for the Policy lab, each a `comparison_document`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calibration.comparison import Comparison, compare, ranking
from calibration.decision_replay import recorded_deployment
from calibration.scenario import Scenario
from dashboard.lab.request import LabRequest, RecordedRequest, Timing
from serving.config import parse
from serving.errors import UserError
from tokentwin import __version__
from tokentwin.comparing import calm, recorded_pairs, side_scenarios, simulated_pairs
from tokentwin.comparison_document import beside, calmness, comparison_document, recorded_side, simulated_side
from tokentwin.costs import Priced
from tokentwin.progress import Tell
from tokentwin.sides import recordings
from traces.recording import Recording

SIMULATED = "dashboard.lab.tasks:simulated"
RECORDED = "dashboard.lab.tasks:recorded"


def simulated(settings: dict[str, Any], out: Path, tell: Tell) -> dict[str, Any]:
    """Both sides of a `LabRequest` on the same arrivals."""
    request = parse(LabRequest, settings, where="lab")
    sides, prices = request.scenarios(request.workloads())
    runs = sum(map(len, sides))
    tell(f"simulating {runs} runs", 0.02)
    pairs = simulated_pairs(sides, request.bounds, lambda done: tell(f"simulating {runs} runs", 0.9 * done / runs))
    tell("telling differences from chance", 0.92)
    ran = [simulated_side(made[0], price.calibration) for made, price in zip(sides, prices, strict=True)]
    return {**comparison_document(pairs, compare(pairs, request.threshold), ran), **_asked(request)}


def recorded(settings: dict[str, Any], out: Path, tell: Tell) -> dict[str, Any]:
    """Recordings of both sides; with a timing also `simulated`, the same runs simulated, and `ranking`."""
    request = parse(RecordedRequest, settings, where="lab")
    sides = [recordings(name, str(path)) for name, path in (("A", request.a), ("B", request.b))]
    tell("reading the recordings", 0.1)
    pairs = recorded_pairs(*sides, request.bounds)
    real = compare(pairs, request.threshold)
    scenarios, prices = _again(sides, request.timing) if request.timing is not None else ([], [])
    found = calm(sides, scenarios)
    told = comparison_document(pairs, real, [recorded_side(side, found) for side in sides]) | calmness(found)
    if scenarios:
        tell("simulating the same runs", 0.4)
        told |= _beside(scenarios, prices, real, request)
    return {**told, **_asked(request)}


def _again(sides: Sequence[Sequence[Recording]], timing: Timing) -> tuple[list[Scenario], list[Priced]]:
    """What was recorded as scenarios, and what times their steps."""
    for side in sides:
        if side[0].run["clock"] != "wall":
            raise UserError("recording", str(side[0].path), "is simulated itself; only a real one is held against it")
    workload = sides[0][0].workload()
    scenarios, prices = [], []
    for side in sides:
        deployment = recorded_deployment(side[0])
        made, price = side_scenarios([workload], timing.calibration, timing.gpu, lambda _, mine=deployment: mine)
        scenarios += made
        prices.append(price)
    return scenarios, prices


def _beside(
    scenarios: Sequence[Scenario], prices: Sequence[Priced], real: Comparison, request: RecordedRequest
) -> dict[str, Any]:
    """The recorded runs simulated, and whether what that ranks A and B by holds in the recordings."""
    pairs = simulated_pairs([[scenario] for scenario in scenarios], request.bounds, lambda _: None)
    ran = [simulated_side(made, price.calibration) for made, price in zip(scenarios, prices, strict=True)]
    comparison = compare(pairs, request.threshold)
    return beside(comparison_document(pairs, comparison, ran), ranking(comparison, real))


def _asked(request: LabRequest | RecordedRequest) -> dict[str, Any]:
    return {"version": __version__, "asked": request.as_json()}
