"""How far a further source may be off: intervals that hold what they say, and that no source widens for itself."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration.steps.interval import StepInterval, factors_of, widened
from calibration.steps.predict import blind
from calibration.validation.external.spread import most_of_one_more, reach
from calibration.validation.external.teaching import Linearised, calibration_of, numbers_of
from dashboard.bundled import EXTERNAL_SAMPLE
from dashboard.trust_page.external_results import covered, load_external
from tests.budget import examples

SOURCES = ("a", "b", "c", "d", "e", "f", "g")
NUMBERS = len(numbers_of(blind()))


@pytest.mark.parametrize(("between", "within"), [(0.1, 0.0), (0.1, 0.05), (0.03, 0.1)])
def test_nine_of_ten_runs_of_a_further_source_are_held(between: float, within: float) -> None:
    """Sources that are off by a factor of their own, and their runs by another each."""
    rng = np.random.default_rng(7)
    held = []
    for _ in range(1500):
        means = between * rng.standard_normal(len(SOURCES) + 1)
        runs = means[:, None] + within * rng.standard_normal((len(means), 12))
        found = reach(dict(zip(SOURCES, runs, strict=False)))
        held.append(np.mean(np.abs(runs[-1]) <= found))
    assert 0.87 <= np.mean(held) <= 0.96


def test_a_source_counts_once_however_many_runs_it_has() -> None:
    misses = {"a": np.array([0.1, -0.2]), "b": np.array([0.05]), "c": np.array([])}
    again = misses | {"a": np.tile(misses["a"], 50)}
    assert reach(again) == pytest.approx(reach(misses))
    with pytest.raises(ValueError, match="1 sources"):
        reach({"a": misses["a"], "c": misses["c"]})


def test_a_clients_time_is_held_nine_times_out_of_ten() -> None:
    rng = np.random.default_rng(3)
    for count in (2, 5):
        times = rng.exponential(20.0, (6000, count + 1))
        held = [mine <= most_of_one_more(others) for *others, mine in times.tolist()]
        assert np.mean(held) == pytest.approx(0.9, abs=0.015)
    assert most_of_one_more([]) == most_of_one_more([-3.0, 0.0]) == 0.0


def linearised(rng: np.random.Generator, offsets: dict[str, float]) -> Linearised:
    """Four TPOTs and four TTFTs of every source, off by its offset and by a little more each."""
    source = np.repeat(list(offsets), 8)
    is_tpot = np.tile([True, False], 4 * len(offsets))
    at = np.repeat(list(offsets.values()), 8) + 0.01 * rng.standard_normal(len(source))
    slopes = rng.dirichlet(np.ones(NUMBERS), len(source))  # a closed loop takes as much longer as its steps do
    return Linearised(at, slopes, np.zeros(NUMBERS), source, is_tpot)


@examples(0.3)
@given(st.floats(-2, 2), st.integers(0, 100))
def test_what_a_source_measured_has_no_part_in_its_own_interval(off: float, seed: int) -> None:
    offsets = dict(zip(SOURCES, (0.1 * np.random.default_rng(seed).standard_normal(7)).tolist(), strict=True))
    found = [linearised(np.random.default_rng(seed), offsets | {"d": d}) for d in (offsets["d"], off)]
    first, second = (each.interval("d") for each in found)
    assert first == second
    assert np.array_equal(found[0].without("d"), found[1].without("d"))


def test_the_interval_grows_with_what_sources_are_apart() -> None:
    """By about the factor that they are, and queueing, which multiplies an error, is taken out again."""
    rng = np.random.default_rng(1)
    near = dict(zip(SOURCES, (0.05 * rng.standard_normal(7)).tolist(), strict=True))
    far = {name: 3 * offset for name, offset in near.items()}
    small, large = (np.log(linearised(np.random.default_rng(2), each).interval("").decode[1]) for each in (near, far))
    assert 2 < large / small < 4
    told = linearised(np.random.default_rng(2), far)
    queued = replace(told, at=2 * told.at, slopes=2 * told.slopes)
    assert np.log(queued.interval("").prompts[1]) == pytest.approx(np.log(told.interval("").prompts[1]), rel=0.3)


def test_numbers_are_those_of_the_calibration_made_of_them() -> None:
    numbers = np.linspace(-0.4, 0.6, NUMBERS)
    assert numbers_of(calibration_of(numbers, "a test")) == pytest.approx(numbers)


@given(st.floats(0.01, 1), st.floats(0, 1), st.floats(0, 1))
def test_a_step_is_as_sure_as_what_it_is_made_of(reach_: float, further: float, share: float) -> None:
    interval = StepInterval(factors_of(reach_), factors_of(2 * reach_))
    low, high = interval.of_step(share)
    assert interval.prompts[0] <= low <= interval.decode[0] <= 1 <= interval.decode[1] <= high * (1 + 1e-12)
    wide = widened((low, high), further)
    assert wide[0] <= low * (1 + 1e-12) and wide[1] >= high * (1 - 1e-12)


def test_the_bundled_intervals_are_taught_by_the_others_and_hold_what_they_say() -> None:
    """Rung 5 of published engines: about nine in ten, of which some rows are known to be wrong."""
    external = load_external(EXTERNAL_SAMPLE)
    assert 0.8 <= covered(external) / len(external.rows) <= 0.97
    assert len(external.rows) > 500
    for case in external.cases:
        assert covered(case) / len(case.rows) >= 0.7, case.name
    for row in (row for case in external.cases for row in case.rows):
        json.dumps([row.low, row.high], allow_nan=False)
        assert row.low <= row.blind <= row.high
