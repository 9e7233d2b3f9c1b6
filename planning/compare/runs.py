"""The two sides of a comparison as runs that can be paired; they are simulated on the same workloads, or recorded.

`tokentwin compare` and the dashboard's Policy lab both use this module, so they cannot give different answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from tokentwin.calibration.steps.observed import ObservedOperations, pure
from tokentwin.calibration.steps.step_cost import StepCost
from tokentwin.calibration.trust import UNKNOWN, Trust, trust_in_run, weakest
from tokentwin.calibration.validation.decision_replay import recorded_deployment
from tokentwin.planning.compare.document import RanDeployment, Side
from tokentwin.planning.compare.paired_runs import COLUMNS, PairedRuns
from tokentwin.planning.priced_scenario import PricedScenario, price_scenario
from tokentwin.planning.traffic import waits_for_answers
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload
from tokentwin.traces.recording import Recording

if TYPE_CHECKING:
    from tokentwin.calibration.validation.disturbance import Disturbance

_NAMED = 5  # maximum number of recordings that an error names


def side_scenarios(
    workloads: Sequence[Workload],
    calibration: str | None,
    gpu: str | None,
    deployment: Deployment,
    replicas: int | None = None,
    router: str = "",
) -> list[PricedScenario]:
    """Return one side's scenarios, one for each workload. Raises UserError as `price_scenario` does."""
    first = price_scenario(workloads[0], calibration, gpu, deployment, replicas, router)
    return [replace(first, workload=workload) for workload in workloads]


def recordings(side: str, path: str | Path) -> list[Recording]:
    """Return the recording in the directory `path`, or the recordings in its subdirectories, sorted by name.

    Raises UserError if there is none, or if one was cut short.
    """
    folder = Path(path)
    folders = [folder]
    if not (folder / "runs.parquet").exists():
        folders = sorted(runs.parent for runs in folder.glob("*/runs.parquet"))
    if not folders:
        raise UserError(
            side, str(path), "is not a recording, because it has no runs.parquet; give a directory with recordings"
        )
    loaded = [Recording.load(place) for place in folders]
    for recording in loaded:
        if recording.run["status"] != "complete":
            remedy = f"is {recording.run['status']}; give a recording that ran to its end"
            raise UserError(side, str(recording.path), remedy)
    return loaded


def simulated_pairs(
    sides: Sequence[Sequence[PricedScenario]], bounds: Mapping[str, float], report: Callable[[int], None]
) -> PairedRuns:
    """Simulate both sides and pair their runs; `report` is called with the number of runs that are done."""
    a: list[pa.Table] = []
    b: list[pa.Table] = []
    for scenarios, tables in zip(sides, (a, b), strict=True):
        for scenario in scenarios:
            tables.append(scenario.requests())
            report(len(a) + len(b))
    waits = waits_for_answers(sides[0][0].workload)
    if waits:  # on the faster side users send more requests before their time is over
        pairs = [_in_both(left, right) for left, right in zip(a, b, strict=True)]
        a, b = [left for left, _ in pairs], [right for _, right in pairs]
    return PairedRuns(a, b, bounds, waits)


def _in_both(a: pa.Table, b: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Return the rows of the requests that both runs count."""
    ids = (table["request_id"] for table in (a, b))
    in_a, in_b = (pc.is_in(own, other.combine_chunks()) for own, other in permutations(ids))
    return a.filter(in_a), b.filter(in_b)


def check_as_many(a: Sequence[Recording], b: Sequence[Recording]) -> None:
    """Raise UserError unless both sides have the same number of recordings."""
    if len(a) != len(b):
        counts = "; ".join(f"{name} has {_named(side)}" for name, side in zip("AB", (a, b), strict=True))
        remedy = f"must be as many for A as for B, because they are compared in pairs: {counts}"
        raise UserError("recordings", [len(a), len(b)], remedy)


def recorded_pairs(a: Sequence[Recording], b: Sequence[Recording], bounds: Mapping[str, float]) -> PairedRuns:
    """Pair recordings of the same workloads in the order given. Raises UserError if the workloads differ."""
    check_as_many(a, b)
    try:
        closed = any(waits_for_answers(recording.workload()) for recording in a)
    except UserError:
        closed = False  # the recording does not hold its workload
    of_a, of_b = ([recording.table("requests", COLUMNS) for recording in side] for side in (a, b))
    return PairedRuns(of_a, of_b, bounds, closed)


def at_known_speed(
    sides: Sequence[Sequence[Recording]], scenarios: Sequence[Sequence[PricedScenario]]
) -> list[list[PricedScenario]] | None:
    """Return the scenario of each recording with each engine's slowdown in that recording; None if it is not known."""
    from tokentwin.calibration.validation.known_speed import (  # imports slowly, because it fits
        machine_slowdown,
        slowed_fleet,
    )

    slowed = []
    for side, simulated in zip(sides, scenarios, strict=False):
        cost = pure(simulated[0].cost)
        machine = machine_slowdown(side, cost.calibration) if isinstance(cost, StepCost) else None
        if machine is None:
            return None
        slowed.append(
            [
                replace(one, deployment=one.deployment.model_copy(update={"fleet": slowed_fleet(recording, machine)}))
                for recording, one in zip(side, simulated, strict=True)
            ]
        )
    return slowed or None


def calm(sides: Sequence[Sequence[Recording]], scenarios: Sequence[PricedScenario] = ()) -> Disturbance | None:
    """Return how disturbed the machine was while the real engine recorded `sides`; None if a side was simulated.

    `scenarios` are the scenarios in which the sides were simulated; their calibrations give the normal step times.
    """
    from tokentwin.calibration.validation.disturbance import disturbance  # imports slowly, because it fits

    if any(recording.run["clock"] != "wall" for side in sides for recording in side):
        return None
    costs = [pure(scenario.cost) for scenario in scenarios]
    known = [cost.calibration if isinstance(cost, StepCost) else None for cost in costs] or [None] * len(sides)
    return disturbance(list(zip(sides, known, strict=True)))


def simulated_side(scenario: PricedScenario) -> Side:
    """Describe a simulated side: the trust in its step times, the calibration behind them, and the deployment.

    The trust is the trust in the least certain pool. It depends on the steps that occurred, so call this after the run.
    """
    trust = scenario.trust()
    return Side(
        **trust._asdict(),
        step_error=_step_error(scenario, trust),
        calibration=scenario.calibration,
        deployment=RanDeployment(**scenario.deployment.model_dump(mode="json")),
        replicas=scenario.engines,
        router=scenario.routes_by,
        defaults=scenario.defaults,
        seen_by=scenario.seen_by,
    )


def _step_error(scenario: PricedScenario, trust: Trust) -> str:
    """Return the interval of the step times of the least certain pool, with its trust; empty if it is not known."""
    for cost in scenario.judged:
        if isinstance(cost, ObservedOperations) and cost.trust() == trust:
            return f"{cost.interval} ({trust.level}: {trust.reason})"
    return ""


def recorded_side(recordings: Sequence[Recording], disturbance: Disturbance | None) -> Side:
    """Describe a recorded side: its clock, its number of runs, its deployment, and the trust in it.

    `disturbance` is the disturbance of the machine during the runs of both sides.
    """
    trust = weakest((trust_in_run(recording.run) for recording in recordings), "recordings")
    if disturbance is not None and disturbance.disturbed:
        trust = Trust(UNKNOWN, f"{trust.reason}, on a machine that was disturbed")
    return Side(
        clock=recordings[0].run["clock"],
        runs=len(recordings),
        deployment=RanDeployment(**recorded_deployment(recordings[0]).model_dump(mode="json")),
        **trust._asdict(),
    )


def _named(side: Sequence[Recording]) -> str:
    """Return the names of recordings and the directory of the first, such as `run-1, run-2 in runs/a`."""
    names = ", ".join(recording.path.name for recording in side[:_NAMED]) + (", ..." if len(side) > _NAMED else "")
    return f"{names} in {side[0].path.parent}"
