"""The benchmarks of predictions for a GPU: what counts as a p99, and that the page of blind ones has its data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lab.benchmarks.blind_gpu import ENGINES, measured_figure, page
from lab.benchmarks.gpu_twin import p99_reach
from lab.gpu_suite.results import load

RESULTS = Path(__file__).parents[2] / "lab" / "results"


def test_the_interval_of_a_p99_is_that_of_its_sampling_error() -> None:
    rng = np.random.default_rng(3)
    assert p99_reach(rng.exponential(size=100)) == float("inf")  # two requests are above the p99 one time in three
    count, density = 20_000, 0.01  # of the exponential distribution at its p99, ln 100
    error = 1.645 * np.sqrt(0.99 * 0.01 / count) / density / np.log(100)
    reaches = [p99_reach(rng.exponential(size=count)) for _ in range(20)]
    assert np.mean(reaches) == pytest.approx(error, rel=0.2)


def test_the_page_of_blind_predictions_has_every_engine_of_the_suite_beside_what_was_measured() -> None:
    data, measured = json.loads((RESULTS / "gpu-blind.json").read_text()), load(RESULTS / "gpu" / "h200")
    assert list(dict.fromkeys(row["engine"] for row in data["engines"])) == list(ENGINES)
    beside = {row["engine"] for row in data["engines"] if measured_figure(measured, row) is not None}
    assert beside == {"large", "small"}  # of the others nothing is measured yet
    written = page(data["predicted"], data["engines"], data["against"], measured, data["about"])
    assert written == (RESULTS / "gpu-blind.md").read_text()
