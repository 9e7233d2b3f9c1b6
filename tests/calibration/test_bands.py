"""Bands: the interval of a calibration covers what it states, and widens where queueing amplifies errors."""

import numpy as np
import pytest

from tokentwin.calibration.steps.features import STEP_FEATURES
from tokentwin.calibration.steps.fit import interval, linear, unseen_by
from tokentwin.calibration.validation.bands import BAND_STATS, bands, run_metrics
from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.workload import Workload, WorkloadRequest

PRICES = np.array([5e6, 1e5, 10.0, 0.0, 2e4, 1.0, 1.0, 0.0, 1e4])


class Recorded:
    """Steps of several recordings, each slower than the truth by its own factor."""

    def __init__(self, rng: np.random.Generator, factors: np.ndarray, steps: int = 30) -> None:
        count = len(factors) * steps
        rows = rng.integers(1, 64, count).astype(float)
        prompt = np.where(rng.random(count) < 0.3, rng.integers(16, 512, count), 0).astype(float)
        zero, one = np.zeros(count), np.ones(count)
        self.features = tuple(STEP_FEATURES)
        self.step = np.column_stack(
            [one, rows, rows * rng.integers(100, 900, count), prompt > 0, prompt, zero, prompt**2 / 2, one, rows]
        )
        self.recording = np.repeat(np.arange(len(factors)), steps)
        noise = 1 + 0.03 * rng.standard_normal(count)
        self.step_ns = self.step @ PRICES * np.asarray(factors)[self.recording] * noise
        self.own_ns, self.speed = self.step_ns, one
        self.sample_ns = self.draft_ns = np.full(count, np.nan)

    def __len__(self) -> int:
        return len(self.step_ns)


def interval_of(steps: Recorded) -> tuple[float, float]:
    unseen = unseen_by(steps, linear(steps))  # type: ignore[arg-type]
    return interval(steps, unseen.part, unseen.blind_ns)  # type: ignore[arg-type]


def test_the_interval_holds_a_further_run_nine_times_out_of_ten() -> None:
    rng = np.random.default_rng(5)
    inside = 0
    for _ in range(150):
        factors = np.exp(0.04 * rng.standard_normal(6))
        low, high = interval_of(Recorded(rng, factors[:5]))
        inside += low <= factors[5] / np.median(factors[:5]) <= high
    assert 0.82 <= inside / 150 <= 0.98


def test_runs_that_do_not_differ_leave_no_interval() -> None:
    low, high = interval_of(Recorded(np.random.default_rng(1), np.ones(5), steps=400))
    assert 0.97 < low < 1 < high < 1.03


def test_a_band_holds_the_centre_and_opens_near_saturation() -> None:
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256, max_model_len=512, num_blocks=400)
    deployment = Deployment(scheduler=scheduler)

    def relative_width(rate_per_s: float) -> float:
        rng = np.random.default_rng(3)
        arrivals = np.cumsum(rng.exponential(1e9 / rate_per_s, 400)).astype(int).tolist()
        workload = Workload([WorkloadRequest(i, t, (("", 64),), 20) for i, t in enumerate(arrivals)])
        runs = [
            run_metrics(workload, deployment, TokenCost(round(5e6 * f), round(2e5 * f), 0)) for f in (1, 0.95, 1.05)
        ]
        band_of = bands(runs[0], runs[1:])
        for name, stats in band_of.items():
            for stat, (low, high) in stats.items():
                centre = runs[0].scalars()[name] if stat == "value" else runs[0].distribution(name).as_dict()[stat]
                assert low <= centre <= high
        assert set(band_of["ttft_ms"]) == set(BAND_STATS)
        low, high = band_of["ttft_ms"]["p99"]
        return (high - low) / low

    idle, busy = relative_width(2), relative_width(16)
    assert idle == pytest.approx(0.105, abs=0.03)
    assert busy > 2 * idle
