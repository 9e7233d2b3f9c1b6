"""The distributions from which synthesis draws arrival times, numbers of tokens, and think times.

An arrival process yields endless chunks of times in nanoseconds, in ascending order. Rates are per second. The arrivals
may be requests or sessions.

Drawn lengths are integers of at least 1; only an output may be 0 (a pooling request). They are clipped to `min` and
`max` after rounding, so `mean` is the mean before clipping. In a spec, a plain number stands for the distribution
`fixed`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field, model_validator

from tokentwin.serving.errors import UserError
from tokentwin.serving.settings import Settings

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

    @property
    def expected(self) -> float:
        """The mean before clipping."""
        raise NotImplementedError

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

    @property
    def expected(self) -> float:
        return float(self.tokens)

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

    @property
    def expected(self) -> float:
        return (self.low + self.high) / 2

    def _values(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return rng.integers(self.low, self.high, count, endpoint=True)


class Exponential(_Lengths):
    """An exponential distribution with mean `mean`."""

    kind: Literal["exponential"]
    mean: float = Field(gt=0, le=LONGEST)

    @property
    def expected(self) -> float:
        return self.mean

    def _values(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return rng.exponential(self.mean, count)


class Lognormal(_Lengths):
    """A lognormal distribution with mean `mean`, and either `sigma` (of the logarithm) or one percentile.

    The mean is m = exp(mu + s^2/2) and the p-quantile is q = exp(mu + z s), so ln(q/m) = z s - s^2/2. This has the two
    roots s = z -+ sqrt(z^2 - 2 ln(q/m)), and the smallest positive root is used.
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

    @property
    def expected(self) -> float:
        return self.mean

    def _values(self, rng: np.random.Generator, count: int) -> np.ndarray:
        sigma = self._sigma()
        return rng.lognormal(math.log(self.mean) - sigma * sigma / 2, sigma, count)


class Empirical(_Lengths):
    """The lengths of a trace's requests, drawn with replacement.

    If `prompt` and `output` name the same trace, both lengths of a request come from one request of the trace.
    """

    kind: Literal["empirical"]
    path: Path


def plain_number(value: Any) -> Any:
    """Return the settings of a constant length for a plain number, and other values unchanged."""
    plain = isinstance(value, (int, str)) and not isinstance(value, bool)
    return {"kind": "fixed", "tokens": value} if plain else value


class NoTokens(_Lengths):
    """No tokens: the outputs of pooling requests."""

    kind: Literal["none"]

    @property
    def expected(self) -> float:
        return 0.0

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return np.zeros(count, np.int64)


def _plain_output(value: Any) -> Any:
    return {"kind": "none"} if value in (0, "0") and not isinstance(value, bool) else plain_number(value)


Drawn = Fixed | Uniform | Exponential | Lognormal
Lengths = Annotated[Annotated[Drawn | Empirical, Field(discriminator="kind")], BeforeValidator(plain_number)]
OutputLengths = Annotated[
    Annotated[Drawn | Empirical | NoTokens, Field(discriminator="kind")], BeforeValidator(_plain_output)
]


_SECOND_NS = 1e9
LATEST_NS = 2.0**62
TOO_LATE = "is too late; a workload ends within 146 years"

Rate = Annotated[float, Field(gt=0, le=1e9)]


class _Arrivals(Settings, allow_inf_nan=False):
    def times_ns(self, rng: np.random.Generator, chunk: int) -> Iterator[np.ndarray]:
        """Yield int64 arrays of `chunk` arrival times, without end."""
        raise NotImplementedError


class _Renewal(_Arrivals):
    """A process whose gaps are drawn independently from one distribution; the first request arrives after a gap."""

    def times_ns(self, rng: np.random.Generator, chunk: int) -> Iterator[np.ndarray]:
        last = 0
        while True:
            gaps = np.rint(self._gaps_ns(rng, chunk))
            _representable(last + gaps.sum())
            times = last + np.cumsum(gaps.astype(np.int64))
            yield times
            last = int(times[-1])

    def _gaps_ns(self, rng: np.random.Generator, chunk: int) -> np.ndarray:
        raise NotImplementedError


class Poisson(_Renewal):
    """Independent arrivals: exponential gaps."""

    kind: Literal["poisson"]
    rate: Rate

    def _gaps_ns(self, rng: np.random.Generator, chunk: int) -> np.ndarray:
        return rng.exponential(_SECOND_NS / self.rate, chunk)


class Gamma(_Renewal):
    """Gamma-distributed gaps with coefficient of variation `cv`: 1 is Poisson, above 1 burstier, below 1 steadier."""

    kind: Literal["gamma"]
    rate: Rate
    cv: float = Field(gt=0, le=100)

    def _gaps_ns(self, rng: np.random.Generator, chunk: int) -> np.ndarray:
        variance = self.cv * self.cv
        return rng.gamma(1 / variance, _SECOND_NS / self.rate * variance, chunk)


class Constant(_Arrivals):
    """A process with one arrival every 1/rate seconds, the first at 0."""

    kind: Literal["constant"]
    rate: Rate

    def times_ns(self, rng: np.random.Generator, chunk: int) -> Iterator[np.ndarray]:
        for first in count(0, chunk):
            times = np.rint(np.arange(first, first + chunk) * (_SECOND_NS / self.rate))
            _representable(times[-1])
            yield times.astype(np.int64)


class Ramp(_Arrivals):
    """A Poisson process whose rate goes from `start_rate` to `end_rate` in `over_s` seconds and stays there.

    Arrivals at unit rate are mapped through the inverse of the cumulative rate a t + k t^2 / 2, where a is the start
    rate and k the slope (time rescaling; Cinlar, Introduction to Stochastic Processes, 1975).
    """

    kind: Literal["ramp"]
    start_rate: float = Field(ge=0, le=1e9)
    end_rate: Rate
    over_s: float = Field(gt=0, le=1e9)

    def times_ns(self, rng: np.random.Generator, chunk: int) -> Iterator[np.ndarray]:
        a, b, over = self.start_rate, self.end_rate, self.over_s
        slope = (b - a) / over
        at_end = (a + b) * over / 2
        last = 0.0
        while True:
            unit = last + np.cumsum(rng.standard_exponential(chunk))
            inside = np.clip(unit, 1e-300, at_end)
            # This form of the root loses no precision by cancellation, and is also valid for k = 0.
            times = 2 * inside / (a + np.sqrt(np.maximum(a * a + 2 * slope * inside, 0)))
            times += np.maximum(unit - at_end, 0) / b
            _representable(times[-1] * _SECOND_NS)
            yield np.rint(times * _SECOND_NS).astype(np.int64)
            last = float(unit[-1])


class Closed(_Arrivals):
    """A closed loop: `concurrency` requests are outstanding, and when one completes, the next one is sent."""

    kind: Literal["closed"]
    concurrency: int = Field(ge=1, le=10**9)

    def times_ns(self, rng: np.random.Generator, chunk: int) -> Iterator[np.ndarray]:
        while True:
            yield np.zeros(chunk, dtype=np.int64)


class Users(_Arrivals):
    """A fixed number of users: each sends a prompt, waits for the answer, and thinks before the next prompt.

    With sessions, users think between two sessions, and a session's own think times hold between its turns. At the
    start each user is somewhere in the middle of a think time or a session.
    """

    kind: Literal["users"]
    users: int = Field(ge=1, le=1_000_000)
    think_ms: Annotated[Drawn, BeforeValidator(plain_number), Field(discriminator="kind")] = Field(
        default=Exponential(kind="exponential", mean=20_000),
        description="time from the end of an answer to the user's next prompt, in milliseconds",
    )


Arrivals = Annotated[Poisson | Gamma | Constant | Ramp | Closed | Users, Field(discriminator="kind")]


def _representable(time_ns: float) -> None:
    if not time_ns < LATEST_NS:
        remedy = "the trace would last longer than 146 years; raise the rate"
        raise UserError("arrivals", f"{time_ns / _SECOND_NS:.3g} s", remedy)
