"""A comparison as it is saved: what can be claimed, what is drawn of it, and what ran, as one JSON document.

It is what `tokentwin compare --format json` prints, what a job of the Policy lab keeps, and what `tokentwin export`
reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from calibration.comparison import Comparison, Ranked
    from calibration.disturbance import Disturbance
    from calibration.paired_runs import PairedRuns
    from calibration.scenario import Scenario
    from traces.recording import Recording

_POINTS = 240  # of a distribution that is drawn


def comparison_document(pairs: PairedRuns, comparison: Comparison, sides: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`Comparison.as_dict`, and

    cdfs        of `a` and `b`, by latency: values in ms, and the percentage of requests within them
    tenants     share of the requests, and of the tokens served to each before the last arrival, in percent
    a, b        what ran: a `simulated_side` or a `recorded_side`

    Whoever saves it adds `version` and `asked`: `{"command": ...}`, or the inputs of the page.
    """
    from calibration.comparison import LATENCIES

    return {
        **comparison.as_dict(),
        "cdfs": {
            name: {latency: _curve(side.values(latency)) for latency in LATENCIES}
            for name, side in (("a", pairs.a), ("b", pairs.b))
        },
        "tenants": _tenants(pairs),
        **dict(zip("ab", sides, strict=True)),
    }


def simulated_side(scenario: Scenario, calibration: str) -> dict[str, Any]:
    """How far to trust its step times (as far as those of its least certain pool), what timed them, and what ran.

    To be asked once it has run: how far to trust them depends on which steps there were.
    """
    mark, reason = scenario.standing()
    return {
        "mark": mark.name.lower(),
        "reason": reason,
        "calibration": calibration,
        "deployment": scenario.deployment.model_dump(mode="json"),
        "replicas": scenario.engines,
        "router": scenario.routes_by,
    }


def recorded_side(recordings: Sequence[Recording], found: Disturbance | None) -> dict[str, Any]:
    """Which clock ran it, how often, what ran, and how far to trust it; `found` is of both sides."""
    from calibration.decision_replay import recorded_deployment
    from calibration.standing import UNKNOWN, Standing, of_run, together

    standing = together((of_run(recording.run) for recording in recordings), "recordings")
    if found is not None and found.disturbed:
        standing = Standing(UNKNOWN, f"{standing.reason}, on a machine that was disturbed")
    return {
        "clock": recordings[0].run["clock"],
        "runs": len(recordings),
        "deployment": recorded_deployment(recordings[0]).model_dump(mode="json"),
        **standing._asdict(),
    }


def calmness(found: Disturbance | None) -> dict[str, Any]:
    """What a document of real runs has more of: whether they were `disturbed`, and the `disturbance` in words."""
    return {} if found is None else {"disturbed": found.disturbed, "disturbance": found.told}


def beside(simulated: dict[str, Any], ranked: Sequence[Ranked]) -> dict[str, Any]:
    """And where they were simulated, too: that document, and whether its claims hold, row by row."""
    return {"simulated": simulated, "ranking": [_plain(asdict(row)) for row in ranked]}


def simulated_errors(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """How far each number that was simulated is off the real one, side by side, of a document that has both.

    `metric`, `stat`, `side`, `simulated` and `real` values, and `error`: in percent of the real one; of a share in
    percentage points. None where there is no number.
    """
    from calibration.comparison import SHARES

    simulated = {(row["metric"], row["stat"]): row for row in (document.get("simulated") or {}).get("rows", ())}
    found = []
    for row in document["rows"]:
        name = row["metric"], row["stat"]
        for side in "ab" if name in simulated else "":
            predicted, real = simulated[name][side], row[side]
            whole = 1.0 if row["metric"] in SHARES else real
            known = predicted is not None and real is not None and whole
            error = 100 * (predicted - real) / whole if known else None
            told = {"metric": name[0], "stat": name[1], "side": side.upper()}
            found.append({**told, "simulated": predicted, "real": real, "error": error})
    return found


def furthest_off(errors: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The worst of the `simulated_errors` that are in percent; None without any."""
    from calibration.comparison import SHARES

    relative = [row for row in errors if row["metric"] not in SHARES and row["error"] is not None]
    return max(relative, key=lambda row: abs(row["error"]), default=None)


def _curve(values: NDArray[Any]) -> dict[str, list[float]]:
    from traces.ecdf import ecdf

    x, y = ecdf(values, _POINTS)
    return {"x": [float(f"{v:.6g}") for v in x], "y": [round(float(v), 3) for v in y]}


def _tenants(pairs: PairedRuns) -> list[dict[str, Any]]:
    import numpy as np

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


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {name: None if isinstance(value, float) and value != value else value for name, value in row.items()}
