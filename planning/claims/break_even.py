"""Where a change begins to pay: the value of one number of an experiment at which both sides are equally good."""

from __future__ import annotations

from planning.claims.claim import BreakEven, Experiment
from planning.claims.figures import central_gain
from planning.settings import overridden
from serving.deployments.config import parse

_HALVINGS = 6  # of the stretch that is searched


def break_even(experiment: Experiment, of: BreakEven) -> str:
    """In a sentence. The gain is taken to go one way between the ends."""
    baseline, change = experiment.sides

    def gain(value: float) -> float:
        number = round(value) if of.whole else value
        sides = (change,) if of.of == "change" else (baseline, change)
        moved = [parse(Experiment, overridden(side.as_json(), {of.path: number}), "experiment") for side in sides]
        return central_gain(baseline if len(moved) == 1 else moved[0], moved[-1])

    low, high = of.least, of.most
    pays_low, pays_high = gain(low) > 1, gain(high) > 1
    if pays_low == pays_high:
        return f"It {'pays' if pays_low else 'does not pay'} from {of.least:g} to {of.most:g} {of.what}."
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if (gain(middle) > 1) == pays_low else (low, middle)
    return f"It pays {'below' if pays_low else 'above'} about {(low + high) / 2:.2g} {of.what}."
