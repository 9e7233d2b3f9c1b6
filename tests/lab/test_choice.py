"""Choosing under a predictive band: the closed form, shared errors, and the effect of accepting more risk."""

from math import erf, exp, log, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lab.decisions.rules import Band, errors, share_of_best
from tokentwin.calibration.steps.interval import REACH
from tokentwin.planning.plan.worth import choose


def normal(x: float) -> float:
    return (1 + erf(x / sqrt(2))) / 2


@pytest.mark.parametrize(("bound", "sigma"), [(12.0, 0.2), (9.0, 0.2), (10.0, 0.05), (30.0, 0.6)])
def test_expected_worth_of_a_lognormal_band_is_its_closed_form(bound: float, sigma: float) -> None:
    """TPOT = 10 exp(sigma z), worth 1 / TPOT up to the bound: the integral is exp(sigma^2 / 2) Phi(b + sigma) / 10."""
    centre = np.array([10.0])
    band = Band(centre * exp(-REACH * sigma), centre, centre * exp(REACH * sigma))
    tpot = band.drawn(errors(["one"], draws=400_000))
    kept = tpot <= bound
    b = log(bound / 10) / sigma
    assert kept.mean() == pytest.approx(normal(b), abs=0.003)
    worth = np.where(kept, 1 / tpot, 0.0).mean()
    assert worth == pytest.approx(exp(sigma**2 / 2) * normal(b + sigma) / 10, rel=0.01)


def test_a_band_has_a_side_for_either_sign() -> None:
    band = Band(np.array([5.0]), np.array([10.0]), np.array([40.0]))
    assert band.drawn(np.array([[-REACH, 0.0, REACH]])).tolist() == [[pytest.approx(5), 10.0, pytest.approx(40)]]


def test_errors_of_a_family_share_what_is_common_and_others_nothing() -> None:
    correlation = np.corrcoef(errors(["H100", "H100", "B200"], common=0.6, draws=100_000))
    assert correlation[0, 1] == pytest.approx(0.6, abs=0.02)
    assert abs(correlation[0, 2]) < 0.02 and abs(correlation[1, 2]) < 0.02
    assert np.std(errors(["H100"], draws=100_000)) == pytest.approx(1, abs=0.02)
    assert (errors(["a", "b"]) == errors(["a", "b"])).all()


OPTIONS = 5


@given(
    holds=arrays(int, OPTIONS, elements=st.integers(0, 100)).map(lambda percent: percent / 100),
    gains=arrays(float, OPTIONS, elements=st.floats(0.1, 10)),
    risks=st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted),
)
def test_more_appetite_for_risk_never_lowers_the_throughput_and_never_makes_it_surer(holds, gains, risks):
    careful, bold = (choose(holds, holds * gains, risk) for risk in risks)
    if careful is None or bold is None:
        assert careful is bold is None and not holds.any()
        return
    assert gains[bold] >= gains[careful] * (1 - 1e-9)
    assert holds[careful] >= (1 - risks[0]) * holds.max() - 1e-9
    assert holds[bold] <= holds[careful] or holds[bold] * gains[bold] >= holds[careful] * gains[careful]


def test_the_choice_goes_by_what_may_be_risked() -> None:
    """Each of three yields enough more than the one before to be worth its risk. The surest tells what is sure."""
    holds, gains = np.array([1.0, 0.95, 0.6]), np.array([1.0, 1.5, 3.0])
    assert [choose(holds, holds * gains, risk) for risk in (0.0, 0.1, 0.5)] == [0, 1, 2]
    assert choose(np.array([0.4, 0.7]), np.array([3.6, 0.7])) == 1
    assert choose(np.array([0.64, 0.7]), np.array([3.6, 0.7])) == 0
    assert choose(np.zeros(3), np.zeros(3)) is None


DRAWN = (OPTIONS, 7)


@given(
    kept=arrays(bool, DRAWN),
    yields=arrays(float, DRAWN, elements=st.floats(0.1, 10)),
    factors=arrays(float, DRAWN[1], elements=st.floats(0.1, 10)),
)
def test_a_share_of_the_best_is_of_what_each_draw_has(kept, yields, factors):
    """What makes all options of a draw slower changes no share; the best of a draw has all of it."""
    share = share_of_best(kept, yields)
    assert (share >= 0).all() and (share <= kept.mean(axis=1) + 1e-9).all()
    assert share.sum() >= kept.any(axis=0).mean() - 1e-9
    assert share_of_best(kept, yields * factors) == pytest.approx(share)


def test_what_keeps_its_bounds_where_others_break_them_is_the_best_there() -> None:
    """A fast option that holds in half of the draws, and one a quarter as fast that always does."""
    kept = np.array([[True, False], [True, True]])
    assert share_of_best(kept, np.array([[4.0, 4.0], [1.0, 1.0]])).tolist() == [0.5, 0.625]
