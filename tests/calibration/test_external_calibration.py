"""A calibration from another engine's iteration log: its fit, its stated errors, and its file."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from tests.calibration.step_model_samples import LLAMA, Roofline, deployment
from tests.calibration.test_step_model import LOG, many_steps, plan_of
from tokentwin.calibration.steps.correction import Correction, step_parts
from tokentwin.calibration.steps.external_calibration import FILE, ExternalCalibration
from tokentwin.calibration.steps.iteration_fit import (
    IterationLog,
    PricedLog,
    calibrate_from_log,
    middle_third,
    read_iteration_log,
)
from tokentwin.calibration.steps.observed import observed
from tokentwin.serving.errors import UserError


def made_by(truth: Correction, noise: float = 0.01, steps: int = 1500) -> IterationLog:
    """Write a log of steps that take the times of `truth`."""
    rng = np.random.default_rng(7)
    sizes = many_steps(rng, steps)
    ns = sum(truth.apply(step_parts(LLAMA, deployment(), Roofline(), sizes), sizes).values())
    return IterationLog(sizes, ns * np.exp(noise * rng.standard_normal(steps)))


TRUTH = Correction(
    factors=Correction().factors | {"compute@8192": 1.25, "past attention": 1.4},
    added_ns={"step": 5e5, "decode row": 1e4, "prompt": 1e5, "prompts only": 1e6, "prompts only, token": 100.0},
)


@pytest.fixture(scope="module")
def learnt() -> ExternalCalibration:
    return calibrate_from_log(made_by(TRUTH), "H100", LLAMA, deployment(), Roofline(), "a test", "2026-11-21")


def test_it_predicts_steps_it_has_not_seen(learnt: ExternalCalibration) -> None:
    assert {name: r["median_pct"] < 1.2 for name, r in learnt.residuals.items()} == dict.fromkeys(
        ("prefill", "decode", "mixed"), True
    )
    low, high = learnt.interval
    assert 0.98 < low <= 1 <= high < 1.02


def test_what_it_measured_stands_as_validated_and_more_does_not(learnt: ExternalCalibration) -> None:
    inside, outside = (observed(learnt.cost(LLAMA, deployment(), Roofline())) for _ in range(2))
    inside.step_ns(plan_of([1000] * 32, []))
    assert inside.trust().level == "validated"
    outside.step_ns(plan_of([8000] * 64, [(60_000, 0)]))
    assert outside.trust().level == "interpolated"
    other = observed(learnt.cost(LLAMA, deployment(tensor_parallel_size=2), Roofline()))
    other.step_ns(plan_of([1000] * 32, []))
    assert other.trust().level == "interpolated"


def test_the_ends_of_its_interval_are_faster_and_slower(learnt: ExternalCalibration) -> None:
    plan = plan_of([1000] * 32, [(300, 100)])
    cost = observed(learnt.cost(LLAMA, deployment(), Roofline()))
    fast, slow = cost.ends()
    low, high = learnt.interval
    assert fast.step_ns(plan) == pytest.approx(low * cost.step_ns(plan), rel=1e-3)
    assert slow.step_ns(plan) == pytest.approx(high * cost.step_ns(plan), rel=1e-3)


def test_decode_steps_and_what_prompts_add_have_ends_of_their_own(learnt: ExternalCalibration, tmp_path: Path) -> None:
    apart = replace(learnt, interval=(0.9, 1.1), prompt_interval=(0.6, 1.5), request_ms=12.0)
    apart.save(tmp_path)
    assert ExternalCalibration.load(tmp_path / FILE) == apart and apart.id != learnt.id
    cost = observed(apart.cost(LLAMA, deployment(), Roofline()))
    decodes, mixed, prompts = plan_of([1000] * 32, []), plan_of([1000] * 32, [(2000, 100)]), plan_of([], [(4000, 0)])
    before = [cost.step_ns(plan) for plan in (decodes, mixed, prompts)]
    low, high = (
        [end.step_ns(p) / ns for p, ns in zip((decodes, mixed, prompts), before, strict=True)] for end in cost.ends()
    )
    assert low[0] == pytest.approx(0.9, rel=5e-3) and high[0] == pytest.approx(1.1, rel=5e-3)
    assert 0.6 < low[2] < low[1] < low[0] and high[0] < high[1] < high[2] < 1.5
    assert [end.cpu_ns(decodes) for end in cost.ends()] == [0, 0]


def test_saved_and_loaded_is_the_same(learnt: ExternalCalibration, tmp_path: Path) -> None:
    learnt.save(tmp_path)
    loaded = ExternalCalibration.load(tmp_path / FILE)
    assert json.dumps(asdict(loaded)) == json.dumps(asdict(learnt))
    assert loaded.id == learnt.id
    assert loaded.cost(LLAMA, deployment(), Roofline()).step_ns(plan_of([9], [])) > 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 9}, "format"),
        ({"interval": [1.2, 1.3]}, "damaged .interval"),
        ({"interval": "x"}, "damaged"),
        ({"prompt_interval": [0.9, 0.95]}, "damaged .prompt_interval"),
        ({"prompt_interval": [0.9]}, "damaged"),
        ({"request_ms": -1}, "damaged .request_ms"),
        ({"correction": {"factors": {}, "domain": {}}}, "no value for weights"),
        ({"host": {"step_ns": -1.0, "row_ns": 0.0}}, "damaged .host.step_ns"),
        ({"unknown": 1}, "damaged"),
        ({"deployment": "{}x"}, "damaged"),
        ({"deployment": '{"model": 3}'}, "model"),
    ],
)
def test_a_damaged_file_is_one_line(learnt: ExternalCalibration, tmp_path: Path, change: dict, says: str) -> None:
    path = tmp_path / FILE
    path.write_text(json.dumps({**asdict(learnt), **change}))
    with pytest.raises(UserError, match=says) as caught:
        ExternalCalibration.load(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        ExternalCalibration.load(tmp_path / FILE)


@pytest.mark.skipif(not LOG.exists(), reason="needs aiconfigurator/fpm_vllm0.20.1_b300 in ../shared/data")
def test_iterations_of_qwen3_32b_are_predicted_from_those_before_and_after() -> None:
    from tokentwin.calibration.steps.external_calibration import kernels
    from tokentwin.serving.deployments.model_catalogue import find_model

    log = read_iteration_log(LOG / "fpm_metrics_detail.csv.gz")
    assert len(log) == 6850
    priced = PricedLog(log, find_model("Qwen/Qwen3-32B"), deployment(), kernels("B300"))
    middle = middle_third(log)
    errors = priced.score(priced.fit(~middle, "first and last third"), middle)
    assert errors["decode"].median_pct < 2.0
    assert errors["mixed"].median_pct < 6.0
    assert errors["mixed"].p95_pct < 20.0
