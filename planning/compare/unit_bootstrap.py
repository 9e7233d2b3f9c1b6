"""Intervals on the difference between two runs of the same requests, by resampling units of requests.

Requests inside a run share its queues, so they are no independent sample. The resampled *units* are whole runs if there
are enough of them, else blocks of consecutive arrivals. A unit is drawn for both sides at once, which is the pairing.
Blocks are few and long rather than many and dependent: Schmeiser (Operations Research 30, 1982) finds that 10 to 30 of
them lose next to nothing, and Student's t makes up for their number. A queue may still outlast a block: correlated
blocks count for fewer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.tables import Floats, ratio

Ints = NDArray[np.int64]

LEVEL = 0.95
FEWEST_UNITS = 5  # fewer units give no interval, because t would be too wide
_DRAWS = 1000
_MOST_CARRIED = 0.5  # lag-1 correlation; beyond it, units of one run cannot tell a trend from noise
_UPPER_QUARTILE = 0.6745  # upper quartile of the standard normal distribution
_MOST_CORRELATED = 0.8  # lag-1 correlation that intervals allow for; two units in twenty are then independent


# A number of one run, as a function of the count of each unit, `[draws, units]`: `[draws]`, NaN where a draw leaves no
# value to compute it from.
Statistic = Callable[[Ints], Floats]


class Ratio:
    """Sum of `numerators` over sum of `denominators`, both `[units]`: means, shares and rates."""

    def __init__(self, numerators: Floats, denominators: Floats) -> None:
        self._numerators, self._denominators = numerators, denominators

    @classmethod
    def mean(cls, values: Floats, unit: Ints, units: int) -> Ratio:
        """Return the mean of `values`; `unit` has the unit of each value, and NaN is no value."""
        known = ~np.isnan(values)
        sums: Floats = np.bincount(unit[known], values[known], units).astype(np.float64)
        return cls(sums, np.bincount(unit[known], minlength=units).astype(np.float64))

    def __call__(self, weights: Ints) -> Floats:
        return ratio(_weighted(weights, self._numerators), _weighted(weights, self._denominators))


class Percentile:
    """The nearest-rank `rank`th percentile of `values`; `unit` has the unit of each value, and NaN is no value."""

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
    """Jain's index of the `service` `[units, tenants]` that tenants got (Jain, Chiu and Hawe 1984)."""

    def __init__(self, service: Floats) -> None:
        self._service = service

    def __call__(self, weights: Ints) -> Floats:
        service = np.einsum("du,ut->dt", weights, self._service)
        return ratio(service.sum(axis=1) ** 2, service.shape[1] * (service**2).sum(axis=1))


def _weighted(weights: Ints, values: NDArray[Any]) -> Any:
    """Return the sum of `values` `[units]` by each row of `weights`.

    It avoids BLAS, which adds in another order on each CPU.
    """
    return np.einsum("du,u->d", weights, values)


@dataclass(frozen=True, slots=True)
class Difference:
    """A statistic of two runs. `low` to `high` is the interval of b - a; NaN if there are too few units.

    `carried`: serial units are more correlated than the interval allows for.
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
    """Return differences with intervals that hold *together*: if nothing differs, none is claimed 95 % of the time.

    Every statistic is drawn on the same units. The intervals allow for the widest studentised deviation of a draw
    (Westfall and Young 1993), so statistics that move together cost little. `serial` units follow one another in time,
    and count as the number of independent units that they are worth. Pairs marked in `ratios` are of positive numbers,
    and are compared by the logarithm of b / a, so that b never falls below zero.
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

    A statistic is taken as the mean of the units' contributions. A unit's contribution is how the statistic varies with
    the unit's weight over the draws. The estimate of r is too low by (1 + 4 r) / n (Kendall 1954), and is corrected for
    that.
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
    """Return the number of independent units that the serial ones are worth: `n (1 - r) / (1 + r)`.

    An autoregression's n terms with lag-1 correlation r are worth as much to their mean (Bayley and Hammersley 1946). r
    is the upper quartile of its estimate, whose standard error is about sqrt((1 - r^2) / n) (Bartlett 1946): few units
    may look independent by chance, and would then support claims where nothing differs.
    """
    error = np.sqrt(np.maximum(1 - correlation**2, 0.0) / units)
    r = np.clip(correlation + _UPPER_QUARTILE * error, 0.0, _MOST_CORRELATED)
    worth: Floats = units * (1 - r) / (1 + r)
    return worth


def _multiple(deviations: Floats, errors: Floats, units: int) -> float:
    """Return the number of standard errors that the intervals reach.

    The bootstrap gives the size that a single normal deviation must have so that all together rarely exceed it;
    Student's t converts this into a number of *estimated* standard errors.
    """
    from scipy.stats import norm, t  # imports slowly

    moves = errors > 0
    if not moves.any():
        return 0.0
    largest = np.nanmax(np.abs(deviations[:, moves]) / errors[moves], axis=1)
    reach = max(float(np.quantile(largest, LEVEL)), float(norm.ppf((1 + LEVEL) / 2)))
    return float(t.isf(norm.sf(reach), units - 1))
