"""The step model on runs of a real GPU: `lab/results/gpu/h200` has them, and no GPU is needed."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tokentwin.calibration.steps.features import MeasuredSteps
from tokentwin.calibration.steps.fit import linear, step_prices
from tokentwin.calibration.steps.surface_fit import surfaces_for, thinned
from tokentwin.serving.deployments.config import Deployment
from tokentwin.traces.recording import Recording

ARCHIVE = Path(__file__).parents[2] / "lab" / "results" / "gpu" / "h200" / "recordings-1.tar"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, list[pa.Table]]:
    folder = tmp_path_factory.mktemp("h200")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    scenarios: dict[str, list[pa.Table]] = {}
    for path in sorted(folder.iterdir()):
        scenarios.setdefault(path.name.rpartition("-")[0], []).append(Recording.load(path).steps)
    return scenarios


def errors(runs: dict[str, list[pa.Table]], knees: bool) -> dict[str, tuple[float, float]]:
    """Return errors of the total time and the usual mixed step of each scenario, predicted from the others."""
    steps = MeasuredSteps([table for tables in runs.values() for table in tables], knees=knees)
    scenario = np.repeat(list(runs), [sum(table.num_rows for table in tables) for tables in runs.values()])
    made = {}
    for name in runs:
        mine = scenario == name
        predicted = steps.step @ step_prices(steps, steps.step_ns, ~mine)
        mixed = mine & (steps.regime == 2)
        usual = float(np.median(np.abs(predicted[mixed] / steps.step_ns[mixed] - 1)))
        made[name] = (float(predicted[mine].sum() / steps.step_ns[mine].sum() - 1), usual)
    return made


def test_a_scenario_of_the_h200_is_predicted_from_the_others(runs) -> None:
    with_knees, without = errors(runs, knees=True), errors(runs, knees=False)
    assert len(with_knees) == 5
    assert all(abs(total) < 0.04 and mixed < 0.06 for total, mixed in with_knees.values()), with_knees
    assert sum(mixed for _, mixed in with_knees.values()) < 0.6 * sum(mixed for _, mixed in without.values())


def test_corrected_kernels_predict_the_mixed_steps_of_a_scenario_better_than_prices(runs) -> None:
    steps = MeasuredSteps([table for tables in runs.values() for table in tables], knees=True)
    scenario = np.repeat(list(runs), [sum(table.num_rows for table in tables) for tables in runs.values()])
    engine = Deployment(model="random:llama-3.1-8b", device="cuda", dtype="bfloat16", attention="triton")
    (surfaces,), prices = surfaces_for(steps, engine, "NVIDIA H200"), linear(steps)
    clock = surfaces.learnt(thinned(np.ones(len(steps), dtype=np.bool_))).machine
    assert clock.compute_exponent > clock.exponent  # a lower clock computes more slowly and reads as fast
    missed: dict[str, list[float]] = {"prices": [], "surfaces": []}
    for name in runs:
        mixed = (scenario == name) & (steps.regime == 2)
        learnt = surfaces.learnt(scenario != name, like=clock)
        of_each = {
            "prices": prices(thinned(scenario != name)),
            "surfaces": (surfaces.predicted_ns(learnt), learnt.machine),
        }
        for way, (predicted, machine) in of_each.items():
            known = machine.own_ns(predicted, steps)[mixed].sum()
            missed[way].append(abs(float(known / steps.own_ns[mixed].sum() - 1)))
    assert np.mean(missed["surfaces"]) < 0.8 * np.mean(missed["prices"]) < 0.03
