"""The point at which a change begins to pay and a verdict flips, by one number of an experiment."""

from __future__ import annotations

import math
from functools import cache

from lab.claims.claim import BreakEven, Expected, Experiment
from lab.claims.figures import Known, central
from planning.settings import overridden
from serving.deployments.config import parse

_HALVINGS = 5  # halvings of the stretch that is searched
_WIDE = 8  # ratio of the stretch's ends from which it is halved by ratio


def break_even(experiment: Experiment, of: BreakEven, expects: Expected) -> str:
    """Return the points in sentences, at the centre of step times.

    The figure is taken to go one way between the ends.
    """
    known: Known = {}

    @cache
    def figure(value: float) -> float:
        moved = {of.path: round(value) if of.whole else value}
        sides = [
            parse(Experiment, overridden(side.as_json(), moved), "experiment") if of.of in ("both", name) else side
            for name, side in zip(("baseline", "change"), experiment.sides, strict=False)
        ]
        return central(sides, known)

    def place_of(bound: float) -> float:
        low, high = of.least, of.most
        wide = low > 0 and high >= _WIDE * low
        begins = figure(low) >= bound
        for _ in range(_HALVINGS):
            middle = math.sqrt(low * high) if wide else (low + high) / 2
            low, high = (middle, high) if (figure(middle) >= bound) == begins else (low, middle)
        return math.sqrt(low * high) if wide else (low + high) / 2

    def where(least: float, most: float) -> str:
        """Return where the figure lies between the bounds."""
        first, last = figure(of.least), figure(of.most)
        enters, leaves = (least, most) if first <= last else (most, least)
        up = 1 if first <= last else -1  # the figure comes from beyond `enters`, and may go beyond `leaves`
        if up * last < up * enters or up * first > up * leaves:
            return "nowhere"
        start = place_of(enters) if up * first < up * enters else None
        stop = place_of(leaves) if up * last > up * leaves else None
        if start is None:
            return "everywhere" if stop is None else f"below about {_short(stop)}"
        return f"above about {_short(start)}" if stop is None else f"from about {_short(start)} to {_short(stop)}"

    said = f"From {of.least:,g} to {of.most:,g} {of.what}:"
    least = -math.inf if expects.least is None else expects.least
    most = math.inf if expects.most is None else expects.most
    if experiment.baseline is not None and least > 1:
        said += f" it pays {where(1.0, math.inf)};"
    return f"{said} the claim holds {where(least, most)}."


def _short(value: float) -> str:
    """Return the number with two digits."""
    return f"{float(f'{value:.2g}'):,g}"
