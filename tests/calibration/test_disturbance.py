"""Disturbed machines are detected from canaries of the same engine, and from steps and their calibration."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planning.diagnosed_runs import arrivals, requests
from tests.planning.sweep_samples import calibrated
from tokentwin.calibration.steps.step_cost import Calibration, StepCost
from tokentwin.calibration.validation.disturbance import disturbance
from tokentwin.planning.compare.runs import calm, recorded_side
from tokentwin.planning.priced_scenario import PricedScenario
from tokentwin.serving.deployments.config import Deployment
from tokentwin.sim.cluster import Cluster
from tokentwin.traces.recording import Recording
from tokentwin.traces.recording_writer import RecordingWriter


def recorded(
    path: Path, deployment: Deployment, calibration: Calibration, canary_ms: list[float], slow: float = 1, **run: str
) -> Recording:
    """Return a run in which every tenth step took `slow` times what the calibration predicts."""
    workload = requests(arrivals(60, 20), 40, 10)
    columns = {"run_id": path.name, "clock": "wall", "deployment": deployment.model_dump_json(), **run}
    with RecordingWriter(path, columns, workload=workload) as writer:
        Cluster(deployment, _Jitter(calibration, slow), writer, shares_prefixes=False).run(workload)
        notes = dict(zip(("canary_before_ns", "canary_after_ns"), (int(1e6 * ms) for ms in canary_ms), strict=False))
        writer.close(notes=json.dumps(notes))
    return Recording.load(path)


class _Jitter(StepCost):
    """Steps that are exact but for every tenth one."""

    def __init__(self, calibration: Calibration, slow: float) -> None:
        super().__init__(calibration)
        self._slow, self._steps = slow, 0

    def step_ns(self, plan):
        self._steps += 1
        return int(super().step_ns(plan) * (1 if self._steps % 10 else self._slow))

    def decode_run_ns(self, rows, context, squares, steps):
        return [int(ns) for ns in super().decode_run_ns(rows, context, squares, steps)]


@pytest.fixture
def engine(tmp_path: Path) -> tuple[Calibration, Deployment]:
    """Return a calibration with a canary of 10 ms, and the run that it was made from."""
    loaded = Calibration.load(calibrated(tmp_path / "cal"))
    return replace(loaded, noise={"canary_ns": [10_000_000]}), Deployment.model_validate_json(loaded.deployment)


def with_places(deployment: Deployment, most: int) -> Deployment:
    return deployment.model_copy(update={"scheduler": deployment.scheduler.model_copy(update={"max_num_seqs": most})})


@pytest.mark.parametrize(("after", "disturbed"), [(10.4, False), (10.6, True)])
def test_a_canary_that_moves_marks_the_runs(after: float, disturbed: bool, engine, tmp_path: Path) -> None:
    calibration, deployment = engine
    run = recorded(tmp_path / "a", deployment, calibration, [10, after])
    judged = disturbance([([run], None)])
    assert judged == (disturbed, f"the canary step took 10–{after} ms ({10 * after - 100:.0f} % apart)")


def test_both_sides_and_the_calibration_are_looked_at_together(engine, tmp_path: Path) -> None:
    calibration, deployment = engine
    a = recorded(tmp_path / "a", with_places(deployment, 4), calibration, [10, 10])
    b = recorded(tmp_path / "b", with_places(deployment, 16), calibration, [12, 12])
    assert not disturbance([([a], None)]).disturbed and not disturbance([([b], None)]).disturbed
    assert disturbance([([a], None), ([b], None)]).disturbed
    assert not disturbance([([a], calibration)]).disturbed and disturbance([([b], calibration)]).disturbed


def test_canaries_of_other_engines_are_not_compared(engine, tmp_path: Path) -> None:
    """With room for two requests the reference step has two rows, and is quicker on the calmest machine."""
    calibration, deployment = engine
    small = recorded(tmp_path / "a", with_places(deployment, 2), calibration, [6, 6])
    large = recorded(tmp_path / "b", deployment, calibration, [10, 10])
    assert not disturbance([([small], calibration), ([large], calibration)]).disturbed


@pytest.mark.parametrize(("slow", "disturbed"), [(1.0, False), (1.2, False), (1.4, True)])
def test_steps_that_took_too_long_mark_the_runs(slow: float, disturbed: bool, engine, tmp_path: Path) -> None:
    calibration, deployment = engine
    run = recorded(tmp_path / "a", deployment, calibration, [], slow)
    judged = disturbance([([run], replace(calibration, noise={}))])
    assert judged.disturbed == disturbed and "over 1.25 times" in judged.evidence
    assert not disturbance([([run], None)]).evidence, "nothing tells how long they should have taken"


def test_only_real_runs_are_looked_at(engine, tmp_path: Path) -> None:
    calibration, deployment = engine
    real = recorded(tmp_path / "a", deployment, calibration, [10, 13], 2)
    simulated = recorded(tmp_path / "b", deployment, calibration, [], clock="virtual")
    scenario = PricedScenario(real.workload(), deployment, StepCost(calibration))
    assert calm([[real], [simulated]]) is None
    judged = calm([[real], [real]], [scenario, scenario])
    assert judged is not None and judged.disturbed and "as long as predicted" in judged.evidence
    side = recorded_side([real], judged)
    assert side.level == "unknown" and "disturbed" in side.reason
    assert recorded_side([real], None).level == "measured"
    bare = calm([[real], [real]])
    assert bare is not None and bare.evidence == "the canary step took 10–13 ms (30 % apart)"
