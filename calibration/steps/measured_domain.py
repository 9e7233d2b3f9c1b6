"""Steps outside the domain that a calibration of our own engine measured, recorded or priced, and their distance."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from calibration.steps.features import REGIMES, Floats
from calibration.steps.step_cost import Calibration


def beyond(calibration: Calibration, features: Floats, regime: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether each feature of each step lies outside its measured range in the regime.

    Features and answer are `[steps, features]`.
    """
    out = np.ones(features.shape, dtype=bool)  # every feature is outside in a regime that was not measured
    for index, name in enumerate(REGIMES):
        ranges = calibration.domain.get(name)
        if ranges is not None:
            mine = regime == index
            low, high = (np.array([ranges[feature][end] for feature in calibration.features]) for end in (0, 1))
            out[mine] = (features[mine] < low) | (features[mine] > high)
    return out


def first_reason(calibration: Calibration, out: NDArray[np.bool_], regime: NDArray[np.int64]) -> str:
    """Return what puts most steps outside, `query-key pairs of prompts, in mixed steps`; empty if none is outside.

    `out` is the answer of `beyond`.
    """
    outside = np.flatnonzero(out.any(axis=1))
    if not len(outside):
        return ""
    meanings = list(calibration.features.values())
    reasons = [f"{meanings[out[at].argmax()]}, in {REGIMES[regime[at]]} steps" for at in outside]
    return max(sorted(set(reasons)), key=reasons.count)


def factor_beyond(ranges: Mapping[str, tuple[float, float]], amounts: Mapping[str, Floats]) -> Floats:
    """Return how many times beyond the nearest measured value the farthest of `amounts` is; 1 inside.

    The amounts are arrays of one shape.
    """
    factors = [np.ones(np.broadcast_shapes(*(np.shape(values) for values in amounts.values())))]
    for name, values in amounts.items():
        low, high = ranges[name]
        with np.errstate(divide="ignore", invalid="ignore"):
            factors += [np.where(values > high, values / high, 1.0), np.where(values < low, low / values, 1.0)]
    return np.maximum.reduce(np.broadcast_arrays(*factors))
