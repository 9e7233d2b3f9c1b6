"""Bisection over whole numbers, one question at a time, for a property that holds from some number on.

An object is one state of the search, so many searches can go in step: `ask` returns the next number to try, `answered`
the state after the answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Bisection:
    """A search for the least number above `low` and at most `most` for which the property holds.

    Attributes:
        low: the property holds neither here nor below
        high: the least number for which it is known to hold; None if there is none yet
        start: tried first; from there the distance is doubled until it holds
    """

    low: int
    most: int
    start: int
    high: int | None = None

    @property
    def done(self) -> bool:
        """True if the answer is known: `high`, or that there is none."""
        return self.low + 1 == self.high if self.high is not None else self.low >= self.most

    @property
    def left(self) -> int:
        """The number of tries that are left; a guess while no number is known to hold."""
        if self.done:
            return 0
        if self.high is not None:
            return (self.high - self.low - 1).bit_length()
        return 1 + max(self.start, self.low).bit_length()

    def ask(self, within: int | None = None) -> int:
        """Return the number to try next; no more than `within` while none is known to hold."""
        if self.high is not None:
            return (self.low + self.high) // 2
        guess = self.start if self.start > self.low else 2 * self.low
        return max(min(guess, self.most if within is None else min(within, self.most)), self.low + 1)

    def answered(self, number: int, holds: bool) -> Bisection:
        """Return the state after the answer for `number`."""
        if holds:
            return replace(self, high=number if self.high is None else min(number, self.high))
        return replace(self, low=max(number, self.low))
