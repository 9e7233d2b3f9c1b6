"""Comparisons as jobs: what `tokentwin.jobs` runs for the Policy lab, and the document that its page draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from calibration.comparison import LATENCIES, Comparison, compare, ranking
from calibration.decision_replay import recorded_deployment
from calibration.paired_runs import PairedRuns
from calibration.scenario import Scenario
from dashboard.lab.request import LabRequest, RecordedRequest, Timing
from dashboard.series import ecdf
from dashboard.standing import of_run, together
from serving.config import parse
from serving.errors import UserError
from tokentwin.comparing import recorded_pairs, side_scenarios, simulated_pairs
from tokentwin.sides import recordings
from traces.recording import Recording

SIMULATED = "dashboard.lab.tasks:simulated"
RECORDED = "dashboard.lab.tasks:recorded"
_POINTS = 240  # of a distribution that is drawn

Tell = Callable[[str, float], None]


def simulated(settings: dict[str, Any], out: Path, tell: Tell) -> dict[str, Any]:
    """Both sides of a `LabRequest` on the same arrivals; see `document`."""
    request = parse(LabRequest, settings, where="lab")
    sides, prices = request.scenarios(request.workloads())
    runs = sum(map(len, sides))
    tell(f"simulating {runs} runs", 0.02)
    pairs = simulated_pairs(sides, request.bounds, lambda done: tell(f"simulating {runs} runs", 0.9 * done / runs))
    tell("telling differences from chance", 0.92)
    told = document(pairs, compare(pairs, request.threshold))
    for name, scenarios, price in zip("ab", sides, prices, strict=True):
        told[name] = {**_trust(scenarios[0]), "calibration": price.calibration, **_ran(scenarios[0])}
    return told


def recorded(settings: dict[str, Any], out: Path, tell: Tell) -> dict[str, Any]:
    """Recordings of both sides; with a timing also `simulated`, the same runs simulated, and `ranking`."""
    request = parse(RecordedRequest, settings, where="lab")
    sides = [recordings(name, str(path)) for name, path in (("A", request.a), ("B", request.b))]
    tell("reading the recordings", 0.1)
    pairs = recorded_pairs(*sides, request.bounds)
    real = compare(pairs, request.threshold)
    told = document(pairs, real)
    for name, side in zip("ab", sides, strict=True):
        told[name] = {
            "clock": side[0].run["clock"],
            "runs": len(side),
            "deployment": recorded_deployment(side[0]).model_dump(mode="json"),
            **together((of_run(recording.run) for recording in side), "recordings")._asdict(),
        }
    if request.timing is not None:
        tell("simulating the same runs", 0.4)
        told |= _beside(sides, real, request, request.timing)
    return told


def _beside(
    sides: Sequence[Sequence[Recording]], real: Comparison, request: RecordedRequest, timing: Timing
) -> dict[str, Any]:
    """The recorded runs simulated, and whether what that ranks A and B by holds in the recordings."""
    for side in sides:
        if side[0].run["clock"] != "wall":
            raise UserError("recording", str(side[0].path), "is simulated itself; only a real one is held against it")
    workload = sides[0][0].workload()
    scenarios, standing = [], []
    for side in sides:
        deployment = recorded_deployment(side[0])
        made, _ = side_scenarios([workload], timing.calibration, timing.gpu, lambda _, mine=deployment: mine)
        scenarios.append(made)
    pairs = simulated_pairs(scenarios, request.bounds, lambda _: None)
    comparison = compare(pairs, request.threshold)
    standing = [_trust(made[0]) for made in scenarios]
    return {
        "simulated": {**document(pairs, comparison), "a": standing[0], "b": standing[1]},
        "ranking": [_plain(asdict(row)) for row in ranking(comparison, real)],
    }


def document(pairs: PairedRuns, comparison: Comparison) -> dict[str, Any]:
    """What `tokentwin compare --format json` tells, the distributions, and what each tenant got.

    cdfs        of `a` and `b`, by latency: values in ms, and the percentage of requests within them
    tenants     share of the requests, and of the tokens served to each before the last arrival, in percent
    """
    return {
        **comparison.as_dict(),
        "cdfs": {
            name: {latency: _curve(side.values(latency)) for latency in LATENCIES}
            for name, side in (("a", pairs.a), ("b", pairs.b))
        },
        "tenants": _tenants(pairs),
    }


def _curve(values: np.ndarray) -> dict[str, list[float]]:
    x, y = ecdf(values, _POINTS)
    return {"x": [float(f"{v:.6g}") for v in x], "y": [round(float(v), 3) for v in y]}


def _tenants(pairs: PairedRuns) -> list[dict[str, Any]]:
    labels = pairs.a.labels("tenant")
    names = np.unique(labels)
    if len(names) < 2:
        return []
    served = [side.served / max(side.served.sum(), 1) for side in (pairs.a, pairs.b)]
    return [
        {
            "tenant": str(name) or "(none)",
            "requests": 100 * float((labels == name).mean()),
            **{key: 100 * float(share[labels == name].sum()) for key, share in zip("ab", served, strict=True)},
        }
        for name in names
    ]


def _trust(scenario: Scenario) -> dict[str, str]:
    """How far to trust the side's step times."""
    mark, reason = scenario.standing()
    return {"mark": mark.name.lower(), "reason": reason}


def _ran(scenario: Scenario) -> dict[str, Any]:
    deployment = scenario.deployment.model_dump(mode="json")
    return {"deployment": deployment, "replicas": scenario.engines, "router": scenario.routes_by}


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {name: None if isinstance(value, float) and value != value else value for name, value in row.items()}
