"""Length distributions, from which synthesis draws numbers of tokens and think times.

Drawn lengths are integers of at least 1. They are clipped to `min` and `max` after rounding, so `mean` is the mean
before clipping. In a spec, a plain number stands for the distribution `fixed`.
"""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field, model_validator

from serving.settings import Settings

LONGEST = 2**31 - 1

_PERCENTILES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}


class _Lengths(Settings, allow_inf_nan=False):
    min: int = Field(1, ge=1, le=LONGEST, description="minimum length; shorter lengths are raised to it")
    max: int = Field(LONGEST, ge=1, le=LONGEST, description="maximum length; longer lengths are cut to it")

    @model_validator(mode="after")
    def _ordered(self) -> _Lengths:
        if self.min > self.max:
            raise ValueError(f"min {self.min} must not be above max {self.max}")
        return self

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Return `count` lengths as int64."""
        clipped = np.clip(np.rint(self._values(rng, count)), self.min, self.max)
        return clipped.astype(np.int64)

    def _values(self, rng: np.random.Generator, count: int) -> np.ndarray:
        raise NotImplementedError


class Fixed(_Lengths):
    """A constant length."""

    kind: Literal["fixed"] = "fixed"
    tokens: int = Field(ge=1, le=LONGEST)

    def _values(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return np.full(count, self.tokens)


class Uniform(_Lengths):
    """A uniform distribution of the integers from `low` to `high`, both included."""

    kind: Literal["uniform"]
    low: int = Field(ge=1, le=LONGEST)
    high: int = Field(ge=1, le=LONGEST)

    @model_validator(mode="after")
    def _interval(self) -> Uniform:
        if self.low > self.high:
            raise ValueError(f"low {self.low} must not be above high {self.high}")
        return self

    def _values(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return rng.integers(self.low, self.high, count, endpoint=True)


class Exponential(_Lengths):
    """An exponential distribution with mean `mean`."""

    kind: Literal["exponential"]
    mean: float = Field(gt=0, le=LONGEST)

    def _values(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return rng.exponential(self.mean, count)


class Lognormal(_Lengths):
    """A lognormal distribution with mean `mean`, and either `sigma` (of the logarithm) or one percentile.

    The mean is m = exp(mu + s^2/2) and the p-quantile is q = exp(mu + z s), so ln(q/m) = z s - s^2/2. This has the two
    roots s = z -+ sqrt(z^2 - 2 ln(q/m)), of which the smallest positive one is used.
    """

    kind: Literal["lognormal"]
    mean: float = Field(gt=0, le=LONGEST)
    sigma: float | None = Field(None, ge=0, le=10)
    p50: float | None = Field(None, gt=0)
    p90: float | None = Field(None, gt=0)
    p95: float | None = Field(None, gt=0)
    p99: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _solvable(self) -> Lognormal:
        self._sigma()
        return self

    def _sigma(self) -> float:
        given = [name for name in ("sigma", *_PERCENTILES) if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of sigma, {', '.join(_PERCENTILES)}")
        if self.sigma is not None:
            return self.sigma
        quantile = getattr(self, given[0])
        if given[0] != "p50" and quantile <= self.mean:
            raise ValueError(f"{given[0]} {quantile:g} must be above mean {self.mean:g}; give sigma for a longer tail")
        z = NormalDist().inv_cdf(_PERCENTILES[given[0]]) if given[0] != "p50" else 0.0
        square = z * z - 2 * math.log(quantile / self.mean)
        roots = [z - math.sqrt(square), z + math.sqrt(square)] if square >= 0 else []
        if not any(root > 0 for root in roots):
            most = self.mean * math.exp(z * z / 2)
            raise ValueError(f"{given[0]} {quantile:g} must be at most {most:.0f} for mean {self.mean:g}")
        return min(root for root in roots if root > 0)

    def _values(self, rng: np.random.Generator, count: int) -> np.ndarray:
        sigma = self._sigma()
        return rng.lognormal(math.log(self.mean) - sigma * sigma / 2, sigma, count)


class Empirical(_Lengths):
    """The lengths of a trace's requests, drawn with replacement.

    If `prompt` and `output` name the same trace, both lengths of a drawn request are used together.
    """

    kind: Literal["empirical"]
    path: Path


def _plain_number(value: Any) -> Any:
    plain = isinstance(value, (int, str)) and not isinstance(value, bool)
    return {"kind": "fixed", "tokens": value} if plain else value


Drawn = Fixed | Uniform | Exponential | Lognormal
Lengths = Annotated[Annotated[Drawn | Empirical, Field(discriminator="kind")], BeforeValidator(_plain_number)]
