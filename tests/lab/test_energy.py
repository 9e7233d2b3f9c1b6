"""The power model and its intervals against published measurements (`lab/results/energy.md`)."""

import numpy as np
import pytest

from lab.energy.published import fit, modelled, published_runs, shares
from lab.energy.simulated import limited_runs, predict, predict_limited
from tokentwin.planning.energy import energy_factors, power_factors
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.traces.metrics.power import FITTED, OTHERS

RUNS = published_runs()
USED, MEASURED = np.array([run.used for run in RUNS]), shares(RUNS)
GPUS = dict.fromkeys(run.gpu for run in RUNS)


def test_the_coefficients_are_those_that_fit_published_power_best() -> None:
    assert {find_gpu(gpu).generation for gpu in GPUS} == set(FITTED)
    for gpu in GPUS:
        assert fit([run for run in RUNS if run.gpu == gpu]) == pytest.approx(
            FITTED[find_gpu(gpu).generation], abs=0.006
        )
    assert fit(RUNS) == pytest.approx(OTHERS, abs=0.006)


@pytest.mark.parametrize("left_out", ["model", "gpu"])
def test_published_power_lies_in_the_interval_that_answers_state(left_out: str) -> None:
    """The interval of other models on these GPUs, and the interval of other GPUs."""
    predicted = np.empty(len(RUNS))
    for gpu, model in {(run.gpu, run.model if left_out == "model" else "") for run in RUNS}:
        one = np.array([run.gpu == gpu and model in ("", run.model) for run in RUNS])
        others = [run for run in RUNS if (run.gpu == gpu and run.model != model if model else run.gpu != gpu)]
        predicted[one] = modelled(USED[one], fit(others))
    low, high = power_factors(find_gpu("H100" if left_out == "model" else "RTX-5090"))
    ratio = MEASURED / predicted
    share = ((low <= ratio) & (ratio <= high)).mean()
    assert share >= 0.88 and (left_out == "gpu" or share <= 0.97)  # for other GPUs it also covers the RTX PRO 6000


def test_predicted_energy_per_token_lies_in_its_interval() -> None:
    chosen = [
        run for run in RUNS if run.model == "Llama-3.1-8B" and run.max_num_seqs in (32, 128) and run.source == "v3"
    ]
    assert len(chosen) == 4
    for run in chosen:
        found, (low, high) = predict(run), energy_factors(run.spec)
        assert low < run.joules_per_token / found.joules_per_token < high, run


def test_a_power_limit_costs_about_as_much_throughput_as_was_measured() -> None:
    runs = {(run.concurrency, run.limit_w): run for run in limited_runs() if run.model == "Qwen3.6-27B"}
    for in_flight in (1, 32):
        whole = runs[in_flight, 600]
        base = predict_limited(whole)
        for limit_w in (400, 300):
            run, found = runs[in_flight, limit_w], predict_limited(runs[in_flight, limit_w])
            assert found.power_w <= limit_w
            measured, predicted = run.tokens_per_s / whole.tokens_per_s, found.tokens_per_s / base.tokens_per_s
            assert predicted == pytest.approx(measured, abs=0.1), run
