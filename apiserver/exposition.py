"""Metrics in Prometheus' text format, stored so that counting and writing take little time.

A gateway may scrape the metrics many times a second, and the thread that hands out tokens answers. So the text of each
line, except for the number, is made only once. Format: https://prometheus.io/docs/instrumenting/exposition_formats/.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal


class Value:
    """The number of a gauge or a counter."""

    __slots__ = ("_line", "value")

    def __init__(self, name: str, labels: str) -> None:
        self.value: float = 0
        self._line = f"{name}{{{labels}}} " if labels else f"{name} "

    def lines(self) -> list[str]:
        return [self.line(self.value)]

    def line(self, value: float) -> str:
        """Return the line with another number."""
        return f"{self._line}{value}"


class Distribution:
    """The number of values in each bucket (bounded by `bounds`), and the sum of all values."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def add(self, counts: Sequence[int], total: float) -> None:
        """Add the counts and the sum of another distribution with the same bounds."""
        self.counts = [mine + more for mine, more in zip(self.counts, counts, strict=True)]
        self.sum += total


class Histogram(Distribution):
    """A distribution that is written as a Prometheus histogram."""

    __slots__ = ("_count", "_lines", "_sum")

    def __init__(self, name: str, labels: str, bounds: Sequence[float]) -> None:
        super().__init__(bounds)
        edges = [*(repr(float(bound)) for bound in bounds), "+Inf"]
        self._lines = [f'{name}_bucket{{{labels},le="{edge}"}} ' for edge in edges]
        self._sum, self._count = (f"{name}_{end}{{{labels}}} " for end in ("sum", "count"))

    def lines(self) -> list[str]:
        """Return the lines for Prometheus: for each bound the number of values up to it, then the sum and the count."""
        below = list(accumulate(self.counts))
        lines = [f"{line}{count}" for line, count in zip(self._lines, below, strict=True)]
        return [*lines, f"{self._sum}{self.sum}", f"{self._count}{below[-1]}"]


@dataclass(frozen=True)
class Family:
    """The description of a metric. `split` is an extra label with its values; `bounds` are those of a histogram."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    bounds: tuple[float, ...] = ()
    split: tuple[str, tuple[str, ...]] = ("", ())

    @property
    def sample_name(self) -> str:
        """The metric's name in a line of text; the name of a counter ends in `_total`."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    @property
    def head(self) -> str:
        """The comment lines (HELP and TYPE) before the series."""
        help = self.help.replace("\\", r"\\").replace("\n", r"\n")
        return f"# HELP {self.sample_name} {help}.\n# TYPE {self.sample_name} {self.kind}"


class Series:
    """One series for each family, or for each value of its `split`; all have the same `labels`."""

    def __init__(self, families: Iterable[Family], labels: Mapping[str, str]) -> None:
        self._by_family: dict[str, list[Value | Histogram]] = {}
        self._values: dict[tuple[str, str], Value] = {}
        self._histograms: dict[str, Histogram] = {}
        self.by_hand: Mapping[str, float] = {}  # numbers to show instead of those that were counted
        for family in families:
            if family.kind == "histogram":
                histogram = Histogram(family.name, labelled(labels), family.bounds)
                self._histograms[family.name] = histogram
                self._by_family[family.name] = [histogram]
                continue
            label, values = family.split
            for value in values or ("",):
                own = {**labels, label: value} if label else labels
                self._values[family.name, value] = made = Value(family.sample_name, labelled(own))
                self._by_family.setdefault(family.name, []).append(made)

    def set(self, name: str, value: float, split: str = "") -> None:
        self._values[name, split].value = value

    def inc(self, name: str, more: float = 1, split: str = "") -> None:
        self._values[name, split].value += more

    def observe(self, name: str, value: float, times: int = 1) -> None:
        self._histograms[name].observe(value, times)

    def add(self, name: str, counts: Sequence[int], total: float) -> None:
        """Add the bucket counts and the sum of values that were observed elsewhere to a histogram."""
        self._histograms[name].add(counts, total)

    def lines(self, name: str) -> list[str]:
        if name in self.by_hand:
            return [self._values[name, ""].line(self.by_hand[name])]
        return [line for one in self._by_family[name] for line in one.lines()]


def exposition(families: Iterable[Family], series: Sequence[Series]) -> bytes:
    """Return all series as text, family by family, as Prometheus requires."""
    blocks = [
        "\n".join([family.head, *(line for one in series for line in one.lines(family.name))]) for family in families
    ]
    return "".join(f"{block}\n" for block in blocks).encode()


def labelled(labels: Mapping[str, str]) -> str:
    """Return labels in the form that they have between the braces of a line."""
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
