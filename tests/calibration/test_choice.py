"""Choosing under a predictive band: the closed form, what errors share, and what more appetite for risk does."""

from __future__ import annotations

from math import erf, exp, log, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from calibration.choice import Band, choose, errors
from calibration.steps.interval import REACH


def normal(x: float) -> float:
    return (1 + erf(x / sqrt(2))) / 2


@pytest.mark.parametrize(("bound", "sigma"), [(12.0, 0.2), (9.0, 0.2), (10.0, 0.05), (30.0, 0.6)])
def test_expected_worth_of_a_lognormal_band_is_its_closed_form(bound: float, sigma: float) -> None:
    """TPOT = 10 exp(sigma z), worth 1 / TPOT up to the bound: the integral is exp(sigma^2 / 2) Phi(b + sigma) / 10."""
    centre = np.array([10.0])
    band = Band(centre * exp(-REACH * sigma), centre, centre * exp(REACH * sigma))
    tpot = band.at(errors(["one"], draws=400_000))
    found = choose(1 / tpot, tpot <= bound, risk=1.0)
    assert found is not None
    b = log(bound / 10) / sigma
    assert found.holds[0] == pytest.approx(normal(b), abs=0.003)
    assert found.worth[0] == pytest.approx(exp(sigma**2 / 2) * normal(b + sigma) / 10, rel=0.01)


def test_a_band_has_a_side_for_either_sign() -> None:
    band = Band(np.array([5.0]), np.array([10.0]), np.array([40.0]))
    assert band.at(np.array([[-REACH, 0.0, REACH]])).tolist() == [[pytest.approx(5), 10.0, pytest.approx(40)]]


def test_errors_of_a_family_share_what_is_common_and_others_nothing() -> None:
    found = np.corrcoef(errors(["H100", "H100", "B200"], common=0.6, draws=100_000))
    assert found[0, 1] == pytest.approx(0.6, abs=0.02)
    assert abs(found[0, 2]) < 0.02 and abs(found[1, 2]) < 0.02
    assert np.std(errors(["H100"], draws=100_000)) == pytest.approx(1, abs=0.02)
    assert (errors(["a", "b"]) == errors(["a", "b"])).all()


OPTIONS, DRAWS = 5, 20


@given(
    gains=arrays(float, (OPTIONS, DRAWS), elements=st.floats(0.1, 10)),
    kept=arrays(bool, (OPTIONS, DRAWS)),
    risks=st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted),
)
def test_more_appetite_for_risk_never_lowers_the_throughput_and_never_makes_it_surer(
    gains: np.ndarray, kept: np.ndarray, risks: list[float]
) -> None:
    careful, bold = (choose(gains, kept, risk) for risk in risks)
    if careful is None or bold is None:
        assert careful is bold is None and not kept.any()
        return
    yields = careful.worth / np.maximum(careful.holds, 1e-12)
    assert yields[bold.best] >= yields[careful.best] - 1e-9
    assert careful.holds[careful.best] >= min(1 - risks[0] - 1e-9, careful.holds.max())
    assert bold.holds[bold.best] <= careful.holds[careful.best] or bold.worth[bold.best] >= careful.worth[careful.best]


def test_the_alternatives_are_the_choices_of_others() -> None:
    """Kept always, in 95 % and in 60 % of the draws; each yields enough more to be worth its risk."""
    kept = np.arange(100)[None, :] < np.array([[100], [95], [60]])
    gains = np.array([[1.0], [1.5], [3.0]]) * np.ones((3, 100))
    found = choose(gains, kept)
    assert found is not None and (found.best, found.safer, found.bolder) == (1, 0, 2)
    surest = choose(gains, kept, risk=0.0)
    assert surest is not None and (surest.best, surest.safer, surest.bolder) == (0, None, 2)
    assert choose(gains, np.zeros((3, 100), bool)) is None


def test_where_nothing_is_sure_enough_the_surest_is_taken() -> None:
    kept = np.arange(100)[None, :] < np.array([[40], [70]])
    found = choose(np.array([[9.0], [1.0]]) * np.ones((2, 100)), kept)
    assert found is not None and found.best == 1 and found.holds[1] == pytest.approx(0.7)
