"""The weather of a machine: things that slow an engine beside its own work, and that no model can predict.

There are two. Other processes run in its place: the part of the wall time that is not CPU time of the thread was taken.
And CPU time itself is longer while memory, caches or clocks are slower; the recorded `speed` shows it. The weather of a
step never depends on that step's own duration: the time taken is that of its neighbours, and speed is measured before
and after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from calibration.steps.features import Floats, MeasuredSteps, sums_around
from calibration.steps.interval import REACH
from serving.figures import shown_percent, shown_share

_STRETCH = 10  # steps whose errors are drawn together
_NEIGHBOURS = 5  # steps on each side that say how much time others take


@dataclass(frozen=True)
class Weather:
    """The weather that a calibration's prices contain.

    Attributes:
        taken: wall time over CPU time of the steps
        speed: median recorded speed
        exponent: a step takes (speed / its speed) ** exponent times as long
        interval: factors of the predicted time between which 9 of 10 runs lie, once their own weather is known
        misses: logarithm of measured over predicted time of each measured step in its own weather, in order: the error
            of a single step that the weather around it does not explain
    """

    taken: float
    speed: float
    exponent: float
    interval: tuple[float, float] = (1.0, 1.0)
    misses: tuple[float, ...] = ()

    def slowness(self, steps: MeasuredSteps) -> Floats:
        """Return the factor by which each step's CPU time is longer than at the calibration's speed `[steps]`."""
        return (self.speed / steps.speed) ** self.exponent

    def own_ns(self, predicted_ns: Floats, steps: MeasuredSteps) -> Floats:
        """Return each step's CPU time `[steps]` at the machine's speed then, where prices predict `predicted_ns`."""
        return predicted_ns / self.taken * self.slowness(steps)

    def slowdown(self, steps: MeasuredSteps) -> Floats:
        """Return the factor on the calibration's prices at each step `[steps]`.

        It is rounded to six decimals, because more depend on the CPU.
        """
        taken = np.empty(len(steps))
        for index in range(steps.recording[-1] + 1):
            mine = steps.recording == index
            taken[mine] = _of_neighbours(steps.step_ns[mine]) / _of_neighbours(steps.own_ns[mine])
        return np.round(taken / self.taken * self.slowness(steps), 6)

    def drawn(self, slowdown: Floats, rng: np.random.Generator) -> Floats:
        """Draw another `slowdown` `[steps]` that this weather could as well have meant.

        All of it is off by a factor of the interval, and each step by a miss. Misses are drawn in stretches, because
        neighbours are alike (moving-block bootstrap, Künsch 1989).
        """
        misses = np.array(self.misses or (0.0,))
        stretches = -(-len(slowdown) // _STRETCH)
        first = rng.integers(0, max(len(misses) - _STRETCH, 0) + 1, stretches)
        places = (first[:, None] + np.arange(_STRETCH)).ravel()[: len(slowdown)] % len(misses)
        spread = np.log(self.interval[1] / self.interval[0]) / (2 * REACH)
        return np.round(slowdown * np.exp(spread * rng.standard_normal() + misses[places]), 6)

    def clause(self, steps: MeasuredSteps) -> str:
        """Return a clause about the weather of `steps`."""
        others = 1 - steps.own_ns.sum() / steps.step_ns.sum()
        low, high = np.percentile(steps.speed, (5, 95))
        return (
            f"others took {shown_share(others)} of the engine's time ({shown_share(1 - 1 / self.taken)} while it was "
            f"calibrated), and the machine's speed varied by {shown_percent(100 * (high / low - 1), 0)}"
        )


def _of_neighbours(times: Floats) -> Floats:
    """Return the sum over the steps around each step, without the step; a single step gives itself."""
    return times if len(times) == 1 else sums_around(times, _NEIGHBOURS)[0] - times
