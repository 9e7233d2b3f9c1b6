"""What was inferred of each setting: values that were tried, lower limits, and what is only assumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tokentwin.planning.learn.answers import Answer
from tokentwin.planning.learn.twin import Twin

CLOSE = 3.0  # difference of log likelihoods below which the answers do not decide between two values


class Candidates(NamedTuple):
    """Values of a setting that were tried, the likeliest first, and how far their log likelihoods lie below it."""

    values: tuple[Any, ...]
    below: tuple[float, ...]

    def alike_but(self, one: Any) -> tuple[Any, ...]:
        """Return the values but `one` that the answers do not tell apart from the likeliest, which is among them."""
        close = (value for value, less in zip(self.values, self.below, strict=True) if less < CLOSE)
        return tuple(value for value in close if value != one)


@dataclass
class Findings:
    """Settings by name.

    Attributes:
        known: settings that are known and not inferred
        tried: the values of each inferred setting
        at_least: lower limits of settings that no question reached; their values are assumed
        ranges: least and greatest of the numbers that the answers do not tell apart from that of the twin
        assumed: names of settings that were not asked about, because the time was up or no question can reveal them
        undecided: names of settings whose other values the answers do not exclude, so that none is claimed
    """

    known: Mapping[str, Any]
    tried: dict[str, Candidates] = field(default_factory=dict)
    at_least: dict[str, int] = field(default_factory=dict)
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)
    assumed: set[str] = field(default_factory=set)
    undecided: set[str] = field(default_factory=set)

    def values(self, name: str, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return the values of a setting to try: the known one, or else `values`."""
        return (self.known[name],) if name in self.known else tuple(values)

    def best(self, twin: Twin, name: str, values: Sequence[Any], judged: Sequence[Answer]) -> Twin:
        """Return the twin with the value of a setting that explains the answers `judged` best; note what was tried."""
        if name in self.known:
            return twin
        return self.likeliest(name, {value: twin.having(**{name: value}) for value in values}, judged)

    def likeliest(self, name: str, tried: Mapping[Any, Twin], judged: Sequence[Answer]) -> Twin:
        """Return the twin that explains the answers best; `tried` are twins by their value of the setting `name`."""
        self.note(name, {value: one.likelihood(judged) for value, one in tried.items()})
        return tried[self.tried[name].values[0]]

    def note(self, name: str, scores: Mapping[Any, float]) -> None:
        """Note the log likelihoods of the values of a setting."""
        ranked = sorted(scores, key=lambda value: -scores[value])
        self.tried[name] = Candidates(tuple(ranked), tuple(scores[ranked[0]] - scores[value] for value in ranked))
