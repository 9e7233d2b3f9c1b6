"""Arrival processes, from which synthesis draws the arrival times of requests or sessions.

A process yields endless chunks of arrival times in nanoseconds, in ascending order. Rates are per second.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from serving.errors import UserError
from serving.settings import Settings

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
            # This form of the root has no cancellation and also holds for k = 0.
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


Arrivals = Annotated[Poisson | Gamma | Constant | Ramp | Closed, Field(discriminator="kind")]


def _representable(time_ns: float) -> None:
    if not time_ns < LATEST_NS:
        remedy = "the trace would last longer than 146 years; raise the rate"
        raise UserError("arrivals", f"{time_ns / _SECOND_NS:.3g} s", remedy)
