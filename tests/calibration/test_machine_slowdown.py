"""Slowdowns of the machine: planted ones are found, never from the step to predict, and used."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.calibration.test_calibration import KnownCost
from tests.calibration.test_covalidation import DEPLOYMENT, PACE, TRACE, designed_workloads, record
from tokentwin.calibration.steps.features import MeasuredSteps
from tokentwin.calibration.steps.fit import fit
from tokentwin.calibration.steps.machine_slowdown import MachineSlowdown
from tokentwin.calibration.steps.step_cost import Calibration
from tokentwin.calibration.validation import known_speed
from tokentwin.calibration.validation.covalidation import covalidate
from tokentwin.calibration.validation.report import ValidationReport
from tokentwin.serving.step_plan import StepPlan
from tokentwin.traces.recording import Recording
from tokentwin.traces.synth import parse_spec, synthesise

EXPONENT, SPEED = 0.7, 2.0


class SlowedCost(KnownCost):
    """Known prices on a machine whose speed changes, and where other processes run now and then."""

    def __init__(self, seed: int) -> None:
        super().__init__(noise=0.01)
        self._random = np.random.default_rng(seed)
        self._speed = self._taken = 1.0
        self.speeds: list[tuple[float, float]] = []

    def step_ns(self, plan: StepPlan) -> int:
        if len(self.speeds) % 12 == 0:
            self._speed, self._taken = np.exp(0.3 * self._random.standard_normal()), self._random.uniform(1, 3)
        self.speeds.append((SPEED * self._speed, self._taken))
        return int(super().step_ns(plan) * self._speed**-EXPONENT * self._taken)


def recorded(path: Path, workload: object, seed: int, shuffled: bool = False) -> Path:
    """Record a "real" run with its own slowdowns; `shuffled` permutes the recorded CPU times of its steps."""
    cost = SlowedCost(seed)
    record(path, workload, cost)  # type: ignore[arg-type]
    steps = pq.read_table(path / "steps.parquet")
    speed, taken = np.array(cost.speeds[: steps.num_rows]).T
    wall = steps["end_ns"].to_numpy() - steps["start_ns"].to_numpy()
    own = (wall / taken).astype(np.int64)
    if shuffled:
        own = np.random.default_rng(0).permutation(own)
    for name, values in (("thread_ns", pa.array(own)), ("speed", pa.array(speed))):
        steps = steps.set_column(steps.column_names.index(name), steps.schema.field(name), values)
    pq.write_table(steps, path / "steps.parquet")
    return path


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    folder = tmp_path_factory.mktemp("calibration")
    traces = designed_workloads(DEPLOYMENT.scheduler, PACE, 200)
    paths = [recorded(folder / w.name, w, seed) for seed, w in enumerate(traces)]
    steps = MeasuredSteps([Recording.load(path).steps for path in paths])
    deployment = DEPLOYMENT.model_dump_json()
    return fit(steps, deployment=deployment, hardware={}, version="0", created="", noise={})


def validated(folder: Path, calibration: Calibration, shuffled: bool = False) -> ValidationReport:
    workload = synthesise(parse_spec(TRACE, where="trace"))
    real = [recorded(folder / f"real-{seed}", workload, 100 + seed, shuffled) for seed in range(2)]
    return covalidate(real, calibration, folder / "report", "")


def test_a_planted_slowdown_is_found(calibration: Calibration) -> None:
    assert calibration.weather is not None
    assert calibration.weather.exponent == pytest.approx(EXPONENT, abs=0.11)
    assert calibration.weather.speed == pytest.approx(SPEED, rel=0.2)
    assert 1.7 < calibration.weather.taken < 2.3


def test_with_the_speed_known_the_twin_is_right_where_blind_it_cannot_be(tmp_path, calibration):
    report = validated(tmp_path, calibration)
    medians = [row for row in report.rows if row.stat == "p50"]
    assert max(abs(row.error_pct or 0) for row in medians) > 5
    assert max(abs(row.weather_error_pct or 0) for row in medians) < 5
    assert report.rungs.step is not None
    for name, regime in report.rungs.step.same_weather.items():
        assert (regime.median_error_pct or 100) < 3, name
    assert report.verdict.startswith("blind ") and "; with the machine's speed known " in report.verdict
    assert report.rungs.run is not None and (report.rungs.run.weather_covered or 0) >= 0.8
    assert not report.disturbed and "others took" in report.disturbance


def test_shuffled_step_times_are_not_explained_away(tmp_path, calibration, monkeypatch):
    """It would pass if the second verdict knew what each step took. Its bands are of no interest."""
    monkeypatch.setattr(known_speed, "_DRAWS", 5)
    report = validated(tmp_path, calibration, shuffled=True)
    assert report.rungs.step is not None
    assert (report.rungs.step.same_weather["decode"].median_error_pct or 0) > 10


@given(st.integers(0, 39), st.floats(0.1, 10))
def test_a_step_says_nothing_of_its_own_slowdown(at: int, factor: float) -> None:
    rng = np.random.default_rng(3)
    steps = MeasuredSteps.__new__(MeasuredSteps)
    steps.step_ns, steps.own_ns = rng.uniform(2e6, 3e6, 40), rng.uniform(1e6, 2e6, 40)
    steps.speed, steps.recording = rng.uniform(0.5, 1, 40), np.repeat([0, 1], 20)
    machine = MachineSlowdown(1.5, 0.8, 0.7)
    before = machine.slowdown(steps)
    steps.step_ns[at] *= factor
    steps.own_ns[at] /= factor
    after = machine.slowdown(steps)
    assert after[at] == pytest.approx(before[at], rel=1e-9)


def test_draws_are_as_far_apart_as_the_interval_and_the_misses_say() -> None:
    rng, misses = np.random.default_rng(0), np.random.default_rng(1).normal(0, 0.2, 500)
    machine = MachineSlowdown(1.5, 0.8, 0.7, (0.9, 1 / 0.9), tuple(misses))
    draws = np.log([machine.drawn(np.ones(200), rng) for _ in range(2000)])
    assert np.std(draws) == pytest.approx(np.hypot(0.2, np.log(1 / 0.9) / 1.645), rel=0.1)
    assert np.mean(np.abs(draws.mean(axis=1)) < np.log(1 / 0.9)) == pytest.approx(0.9, abs=0.04)


def test_a_calibration_with_a_slowdown_is_loaded_as_it_was_saved(tmp_path: Path, calibration: Calibration) -> None:
    calibration.save(tmp_path)
    assert Calibration.load(tmp_path).weather == calibration.weather
