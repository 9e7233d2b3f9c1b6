"""Intervals on the difference between two runs of the same requests, by resampling units of requests.

Requests inside a run share its queues, so they are no independent sample. The resampled *units* are whole runs if there
are enough of them, else blocks of consecutive arrivals. A unit is drawn for both sides at once; this pairs the sides.
Few long blocks are used, because many short ones would depend on each other. Schmeiser (Operations Research 30, 1982)
finds that 10 to 30 blocks lose next to nothing, and Student's t allows for their small number. A queue may still
outlast a block, so correlated blocks count as fewer independent ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokentwin.traces.tables import Floats, ratio

Ints = NDArray[np.int64]

LEVEL = 0.95
FEWEST_UNITS = 5  # fewer units give no interval, because t would be too wide
_DRAWS = 1000
_MOST_CARRIED = 0.5  # maximum lag-1 correlation; beyond it, units of one run cannot tell a trend from noise
_UPPER_QUARTILE = 0.6745  # upper quartile of the standard normal distribution
_MOST_CORRELATED = 0.8  # maximum lag-1 correlation that intervals allow for; 20 units are then worth 2 independent ones


# A statistic of one run: a function from the count of each unit in each draw, `[draws, units]`, to a number for each
# draw, `[draws]`. The number is NaN where a draw leaves no value to compute it from.
Statistic = Callable[[Ints], Floats]


class Ratio:
    """The sum of `numerators` divided by the sum of `denominators`, both `[units]`: a mean, a share or a rate."""

    def __init__(self, numerators: Floats, denominators: Floats) -> None:
        self._numerators, self._denominators = numerators, denominators

    @classmethod
    def mean(cls, values: Floats, unit: Ints, units: int) -> Ratio:
        """Return the mean of `values`; `unit` has the unit number of each value, and NaN stands for no value."""
        known = ~np.isnan(values)
        sums: Floats = np.bincount(unit[known], values[known], units).astype(np.float64)
        return cls(sums, np.bincount(unit[known], minlength=units).astype(np.float64))

    def __call__(self, weights: Ints) -> Floats:
        return ratio(_weighted(weights, self._numerators), _weighted(weights, self._denominators))


class Percentile:
    """The nearest-rank percentile `rank` of `values`; `unit` has their unit numbers, and NaN stands for no value."""

    def __init__(self, values: Floats, unit: Ints, units: int, rank: int) -> None:
        known = ~np.isnan(values)
        order = np.argsort(values[known], kind="stable")
        self._values = values[known][order]
        self._unit = unit[known][order]
        self._units = units
        self._rank = rank

    def __call__(self, weights: Ints) -> Floats:
        if not len(self._values):
            return np.full(len(weights), np.nan)
        # Number of values of each unit among the first values, for each position: [units, values].
        passed = np.cumsum(self._unit == np.arange(self._units)[:, None], axis=1, dtype=np.int32)
        counts = _weighted(weights, passed[:, -1])
        needed = np.maximum(-(-self._rank * counts // 100), 1)
        low, high = np.zeros(len(weights), dtype=np.int64), np.full(len(weights), len(self._values) - 1)
        while (low < high).any():
            middle = (low + high) // 2
            enough = np.einsum("du,ud->d", weights, passed[:, middle]) >= needed
            low, high = np.where(enough, low, middle + 1), np.where(enough, middle, high)
        return np.where(counts > 0, self._values[np.minimum(low, len(self._values) - 1)], np.nan)


class Jain:
    """Jain's fairness index of the `service` `[units, tenants]` that tenants got (Jain, Chiu and Hawe 1984)."""

    def __init__(self, service: Floats) -> None:
        self._service = service

    def __call__(self, weights: Ints) -> Floats:
        service = np.einsum("du,ut->dt", weights, self._service)
        return ratio(service.sum(axis=1) ** 2, service.shape[1] * (service**2).sum(axis=1))


def _weighted(weights: Ints, values: NDArray[Any]) -> Any:
    """Return the sum of `values` `[units]` weighted by each row of `weights` `[draws, units]`.

    It avoids BLAS, because BLAS adds in a different order on each kind of CPU.
    """
    return np.einsum("du,u->d", weights, values)


@dataclass(frozen=True, slots=True)
class Difference:
    """A statistic of two runs. `low` to `high` is the interval of b - a; NaN if there are too few units.

    `carried` is True if serial units are more correlated than the interval allows for.
    """

    a: float
    b: float
    low: float
    high: float
    carried: bool = False

    @property
    def difference(self) -> float:
        return self.b - self.a

    @property
    def claimed(self) -> bool:
        """True if the interval excludes zero."""
        return self.difference != 0 and (self.low > 0 or self.high < 0)


def differences(
    pairs: Sequence[tuple[Statistic, Statistic]],
    units: int,
    seed: int = 0,
    serial: bool = False,
    ratios: Sequence[bool] = (),
) -> list[Difference]:
    """Return differences with joint 95 % intervals: if nothing differs, no difference is claimed 95 % of the time.

    Every draw uses the same units for all statistics. The intervals allow for the widest studentised deviation of a
    draw (Westfall and Young 1993), so a further statistic that moves with others widens them little. `serial` units
    follow one another in time, and count as the smaller number of independent units that they are worth. Pairs marked
    in `ratios` have positive numbers, and are compared by the logarithm of b / a, so that b never falls below zero.
    """
    whole = np.ones((1, units), dtype=np.int64)
    points = np.array([[float(statistic(whole)[0]) for statistic in pair] for pair in pairs]).reshape(-1, 2)
    if units < FEWEST_UNITS or not pairs:
        return [Difference(a, b, math.nan, math.nan) for a, b in points.tolist()]
    rng = np.random.Generator(np.random.PCG64(seed))
    weights = rng.multinomial(units, np.full(units, 1 / units), size=_DRAWS)
    by_ratio = np.zeros(len(pairs), dtype=bool)
    by_ratio[: len(ratios)] = ratios
    by_ratio &= (points > 0).all(axis=1)
    drawn = np.column_stack(
        [_change(a(weights), b(weights), ratio) for (a, b), ratio in zip(pairs, by_ratio.tolist(), strict=True)]
    )
    moved = np.where(by_ratio, _change(points[:, 0], points[:, 1], True), _change(points[:, 0], points[:, 1], False))
    correlation = _correlation(weights, drawn) if serial else np.full(len(pairs), -1.0)
    worth = _worth(correlation, units) if serial else np.full(len(pairs), float(units))
    with np.errstate(invalid="ignore"):
        errors = np.nanstd(drawn, axis=0) * math.sqrt(units / (units - 1))
    half = _multiple(drawn - moved, errors, units) * errors * np.sqrt(units / worth)
    low, high = (np.where(by_ratio, points[:, 0] * np.expm1(end), end) for end in (moved - half, moved + half))
    carried = correlation >= _MOST_CARRIED
    numbers = zip(points.tolist(), low.tolist(), high.tolist(), carried.tolist(), strict=True)
    return [Difference(a, b, below, above, carried) for (a, b), below, above, carried in numbers]


def _change(a: Floats, b: Floats, ratio: bool) -> Floats:
    """Return b - a, or the logarithm of b / a; NaN if there is no logarithm."""
    if not ratio:
        return b - a
    changes: Floats = np.full(len(a), np.nan)
    both = (a > 0) & (b > 0)
    changes[both] = np.log(b[both] / a[both])
    return changes


def _correlation(weights: Ints, drawn: Floats) -> Floats:
    """Return the lag-1 correlation of the contributions of serial units to each statistic.

    A statistic is treated as the mean of the contributions of its units. A unit's contribution is the covariance, over
    the draws, of the statistic with the unit's weight. The estimate of r is too low by (1 + 4 r) / n (Kendall 1954),
    and the returned value is corrected for this.
    """
    units = weights.shape[1]
    moves = np.nan_to_num(drawn - np.nanmean(drawn, axis=0))
    shares = np.einsum("du,ds->us", weights - 1.0, moves)
    shares -= shares.mean(axis=0)
    total = (shares**2).sum(axis=0)
    r = np.divide((shares[1:] * shares[:-1]).sum(axis=0), total, out=np.zeros_like(total), where=total > 0)
    corrected: Floats = np.where(total > 0, r + (1 + 4 * r) / units, -1.0)
    return corrected


def _worth(correlation: Floats, units: int) -> Floats:
    """Return the number of independent units that the serial units are worth: `n (1 - r) / (1 + r)`.

    The mean of n terms of an autoregression with lag-1 correlation r is as precise as the mean of this many independent
    terms (Bayley and Hammersley 1946). r is the upper quartile of the estimate; its standard error is about
    sqrt((1 - r^2) / n) (Bartlett 1946). The estimate itself would not do: few units may look independent by chance, and
    would then support claims where nothing differs.
    """
    error = np.sqrt(np.maximum(1 - correlation**2, 0.0) / units)
    r = np.clip(correlation + _UPPER_QUARTILE * error, 0.0, _MOST_CORRELATED)
    worth: Floats = units * (1 - r) / (1 + r)
    return worth


def _multiple(deviations: Floats, errors: Floats, units: int) -> float:
    """Return the half-width of the intervals in standard errors.

    The bootstrap gives a bound, in standard errors, that the largest of all deviations rarely exceeds. Student's t
    converts it into a number of *estimated* standard errors.
    """
    from scipy.stats import norm, t  # imports slowly

    moves = errors > 0
    if not moves.any():
        return 0.0
    largest = np.nanmax(np.abs(deviations[:, moves]) / errors[moves], axis=1)
    reach = max(float(np.quantile(largest, LEVEL)), float(norm.ppf((1 + LEVEL) / 2)))
    return float(t.isf(norm.sf(reach), units - 1))
