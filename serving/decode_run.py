"""Durations of steady decode steps whose price grows linearly, summed in closed form.

Prices are integer picoseconds, and each step is rounded down to nanoseconds by itself. Sums of rounded terms follow
from Euclid's algorithm (Graham, Knuth and Patashnik, "Concrete Mathematics", 2nd edition, section 3.5).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt


class DecodeRun:
    """The nanoseconds of `own_steps` steps, at least one, which take `own_ns`, followed by the steps of `then`.

    Step i of its own takes `(first_ps + i * growth_ps) // 1000`. `growth_ps` is not negative.
    """

    __slots__ = ("first_ps", "growth_ps", "own_ns", "own_steps", "steps", "then")

    def __init__(self, first_ps: int, growth_ps: int, steps: int, then: DecodeRun | None = None) -> None:
        self.first_ps = first_ps
        self.growth_ps = growth_ps
        self.own_steps = steps
        self.own_ns = self._sum(steps)
        self.then = then
        self.steps: int = steps if then is None else steps + then.steps

    def __iter__(self) -> Iterator[int]:
        first, growth = self.first_ps, self.growth_ps
        durations = [(first + growth * step) // 1000 for step in range(self.own_steps)]
        if self.then is not None:
            durations += self.then
        return iter(durations)

    def shortest_ns(self) -> int:
        first = self.first_ps // 1000
        return first if self.then is None else min(first, self.then.shortest_ns())

    def longer(self, ns: int) -> DecodeRun:
        """Return the same steps, each `ns` longer."""
        then = None if self.then is None else self.then.longer(ns)
        return DecodeRun(self.first_ps + 1000 * ns, self.growth_ps, self.own_steps, then)

    def until(self, steps: int) -> int:
        """Return the nanoseconds of the first `steps` steps."""
        if steps < self.own_steps:
            return self._sum(steps)
        return self.own_ns if self.then is None else self.own_ns + self.then.until(steps - self.own_steps)

    def ended(self, ns: int) -> int:
        """Return how many steps end within `ns`."""
        if ns >= self.own_ns:
            return self.own_steps if self.then is None else self.own_steps + self.then.ended(ns - self.own_ns)
        first, growth = self.first_ps, self.growth_ps
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
        growth, over, divisor = self.growth_ps, self.first_ps, 1000
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
