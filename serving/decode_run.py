"""Durations of steady decode steps whose price grows linearly, summed in closed form.

Prices are integer picoseconds, and the duration of each step is rounded down to nanoseconds. An algorithm like Euclid's
gives the sum of the rounded durations (Graham, Knuth and Patashnik, "Concrete Mathematics", 2nd edition, section 3.5).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt


class DecodeRun:
    """The durations of `steps` steps (at least one), followed by those of `then`, in nanoseconds.

    Step i takes `(first_ps + i * growth_ps) // 1000` ns. `growth_ps` is not negative.
    """

    __slots__ = ("_first_ps", "_growth_ps", "_here", "_here_ns", "steps", "then")

    def __init__(self, first_ps: int, growth_ps: int, steps: int, then: DecodeRun | None = None) -> None:
        self._first_ps = first_ps
        self._growth_ps = growth_ps
        self._here = steps
        self._here_ns = self._sum(steps)
        self.then = then
        self.steps: int = steps if then is None else steps + then.steps

    def __iter__(self) -> Iterator[int]:
        return iter(self.durations_ns(self.steps))

    def durations_ns(self, steps: int) -> list[int]:
        """Return the nanoseconds of each of the first `steps` steps."""
        first, growth = self._first_ps, self._growth_ps
        durations = [(first + growth * step) // 1000 for step in range(min(steps, self._here))]
        if self.then is not None and steps > self._here:
            durations += self.then.durations_ns(steps - self._here)
        return durations

    def shortest_ns(self) -> int:
        first = self._first_ps // 1000
        return first if self.then is None else min(first, self.then.shortest_ns())

    def longer(self, ns: int) -> DecodeRun:
        """Return a run in which each step takes `ns` longer."""
        then = None if self.then is None else self.then.longer(ns)
        return DecodeRun(self._first_ps + 1000 * ns, self._growth_ps, self._here, then)

    def until(self, steps: int) -> int:
        """Return the nanoseconds of the first `steps` steps."""
        if steps < self._here:
            return self._sum(steps)
        return self._here_ns if self.then is None else self._here_ns + self.then.until(steps - self._here)

    def ended(self, ns: int) -> int:
        """Return how many steps end within `ns`."""
        if ns >= self._here_ns:
            return self._here if self.then is None else self._here + self.then.ended(ns - self._here_ns)
        first, growth = self._first_ps, self._growth_ps
        if not growth:
            return ns // (first // 1000)
        # The root of a quadratic is the number of steps that end without rounding; with rounding, more may end.
        linear = 2 * first - growth
        steps = (isqrt(linear * linear + 8000 * growth * ns) - linear) // (2 * growth)
        while self._sum(steps + 1) <= ns:
            steps += 1
        return steps

    def _sum(self, steps: int) -> int:
        """Return the nanoseconds of the first `steps` steps of this piece."""
        growth, over, divisor = self._growth_ps, self._first_ps, 1000
        total = 0
        while steps > 0:
            total += steps * (steps - 1) // 2 * (growth // divisor) + steps * (over // divisor)
            growth %= divisor
            over = growth * steps + over % divisor
            steps, over = over // divisor, over % divisor
            growth, divisor = divisor, growth
            if not divisor:
                break
        return total
