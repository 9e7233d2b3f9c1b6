"""Bisection over whole numbers for a property that holds from some number on.

An object is one state of a search. The caller tries one number at a time, so many searches can run in parallel: `ask`
returns the next number to try, and `answered` returns the state after the result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Bisection:
    """A search for the lowest number above `low` and up to `most` for which the property holds.

    Attributes:
        low: number for which the property does not hold, like all numbers below
        most: maximum number
        start: first number to try; then numbers are doubled until the property holds
        high: lowest number for which the property is known to hold; None if there is none yet
    """

    low: int
    most: int
    start: int
    high: int | None = None

    @property
    def done(self) -> bool:
        """True if the search has ended: the answer is `high`, or there is no such number."""
        return self.low + 1 == self.high if self.high is not None else self.low >= self.most

    @property
    def left(self) -> int:
        """The number of tries left; an estimate as long as `high` is None."""
        if self.done:
            return 0
        if self.high is not None:
            return (self.high - self.low - 1).bit_length()
        return 1 + max(self.start, self.low).bit_length()

    def ask(self, within: int | None = None) -> int:
        """Return the number to try next; as long as `high` is None, it does not exceed `within`."""
        if self.high is not None:
            return (self.low + self.high) // 2
        guess = self.start if self.start > self.low else 2 * self.low
        return max(min(guess, self.most if within is None else min(within, self.most)), self.low + 1)

    def answered(self, number: int, holds: bool) -> Bisection:
        """Return the state of the search after a try: `holds` says whether the property holds for `number`."""
        if holds:
            return replace(self, high=number if self.high is None else min(number, self.high))
        return replace(self, low=max(number, self.low))
