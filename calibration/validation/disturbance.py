"""A check whether the machine was disturbed while the real engine was recorded.

If the recordings have the machine's speed, no run counts as disturbed, because it is simulated with its speed known.
Otherwise a machine was undisturbed if two conditions hold: the canary (a fixed reference step, timed before and after
every run) always took about the same time, and few steps took much longer than a calibration of the engine predicts.
Errors of a disturbed run are partly due to the machine.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

from tokentwin.calibration.steps.features import MeasuredSteps
from tokentwin.calibration.steps.fit import predict
from tokentwin.calibration.steps.machine_slowdown import MachineSlowdown
from tokentwin.calibration.steps.step_cost import Calibration
from tokentwin.calibration.validation.decision_replay import recorded_deployment
from tokentwin.calibration.validation.known_speed import machine_slowdown
from tokentwin.serving.answers.figures import shown_band, shown_percent, shown_share
from tokentwin.serving.canary import CALM_DRIFT, canary_rows
from tokentwin.serving.deployments.config import Deployment, parse
from tokentwin.traces.recording import Recording, notes_of

_SLOW = 1.25  # ratio of measured to predicted time above which a step was disturbed
_SLOW_SHARE = 0.03  # share of such steps above which the runs count as disturbed


Side = tuple[Sequence[Recording], Calibration | None]


class Disturbance(NamedTuple):
    """True if the runs were disturbed, and a sentence of evidence, which may be empty."""

    disturbed: bool
    evidence: str


def disturbance(sides: Sequence[Side]) -> Disturbance:
    """Check recordings of the real engine that were made together.

    A side is a pair of recordings and their calibration, which may be None.
    """
    steps = [run.steps for runs, _ in sides for run in runs if run.steps.num_rows]
    slowdowns = [calibration and machine_slowdown(runs, calibration) for runs, calibration in sides]
    if steps and all(slowdowns):
        return Disturbance(False, cast(MachineSlowdown, slowdowns[0]).clause(MeasuredSteps(steps)))
    drift, canary = canary_drift(sides)
    held_up, slow = _held_up(sides)
    return Disturbance(drift > CALM_DRIFT or held_up > _SLOW_SHARE, "; ".join(filter(None, (canary, slow))))


def calibrated_deployment(calibration: Calibration) -> Deployment:
    """Return the deployment that was calibrated."""
    return parse(Deployment, json.loads(calibration.deployment), where="calibration.deployment")


def canary_drift(sides: Sequence[Side]) -> tuple[float, str]:
    """Return the largest relative difference between canary times of one engine, and a clause about this drift."""
    times_ns: dict[str, list[int]] = defaultdict(list)
    for engine, ns in _canaries(sides):
        times_ns[engine].append(ns)
    compared = [(max(times) / min(times) - 1, times) for times in times_ns.values() if len(times) > 1]
    if not compared:
        return 0.0, ""
    drift, times = max(compared)
    took = shown_band(min(times) / 1e6, max(times) / 1e6)
    return drift, f"the canary step took {took} ms ({shown_percent(100 * drift, 0)} apart)"


def _canaries(sides: Sequence[Side]) -> Iterator[tuple[str, int]]:
    """Yield a key and a time of every canary; canaries with one key take equal times on an undisturbed machine."""
    for runs, calibration in sides:
        if calibration is not None:
            for ns in calibration.noise.get("canary_ns", []):
                yield _engine(calibrated_deployment(calibration)), int(ns)
        for run in runs:
            for name in ("canary_before_ns", "canary_after_ns"):
                if name in notes_of(run.run):
                    yield _engine(recorded_deployment(run)), int(notes_of(run.run)[name])


def _engine(deployment: Deployment) -> str:
    return f"{deployment.timing().model_dump_json()} {canary_rows(deployment.scheduler.max_num_seqs)}"


def _held_up(sides: Sequence[Side]) -> tuple[float, str]:
    """Return the share of disturbed steps among all steps that a calibration predicts, and a clause about the share."""
    slow = total = 0
    for runs, calibration in sides:
        if calibration is None:
            continue
        engine = calibrated_deployment(calibration).timing()
        tables = [run.steps for run in runs if recorded_deployment(run).timing() == engine and run.steps.num_rows]
        if tables:
            steps = MeasuredSteps(tables, knees=calibration.knees)
            slow += int((steps.step_ns > _SLOW * predict(calibration, steps)).sum())
            total += len(steps)
    if not total:
        return 0.0, ""
    return (
        slow / total,
        f"{shown_share(slow / total, 1)} of the real steps took over {_SLOW:g} times as long as predicted",
    )
