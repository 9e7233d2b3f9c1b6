"""The weather of a machine: what takes time from the engine beside its own work, and is not the model's to predict.

Two things do. Others run in its place: the time on the wall that is not CPU time of the thread was taken. And the CPU
time itself is longer while memory, caches or clocks are slower, which the recorded `speed` tells.

What is said of a step's weather never depends on that step's own duration: time taken is that of its neighbours, and
speed is looked at before and after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from calibration.steps.features import Floats, MeasuredSteps

_NEIGHBOURS = 5  # steps on each side that tell how much time others take


@dataclass(frozen=True)
class Weather:
    """What a calibration's prices contain of the weather it was measured in.

    taken     wall time over CPU time of the steps
    speed     median recorded speed
    exponent  a step takes (speed / its speed) ** exponent times as long
    interval  factors of the predicted time between which 9 of 10 runs lie, once their own weather is known
    """

    taken: float
    speed: float
    exponent: float
    interval: tuple[float, float] = (1.0, 1.0)

    def slowness(self, steps: MeasuredSteps) -> Floats:
        """By how much the CPU time of each step is longer than at the calibration's speed `[steps]`."""
        found: Floats = (self.speed / steps.speed) ** self.exponent
        return found

    def slowdown(self, steps: MeasuredSteps) -> Floats:
        """The factor on the calibration's prices at each step `[steps]`."""
        taken = np.empty(len(steps))
        for index in range(steps.recording[-1] + 1):
            mine = steps.recording == index
            taken[mine] = _of_neighbours(steps.step_ns[mine]) / _of_neighbours(steps.own_ns[mine])
        return taken / self.taken * self.slowness(steps)

    def told(self, steps: MeasuredSteps) -> str:
        """What the weather of `steps` was, in a clause."""
        others = 1 - steps.own_ns.sum() / steps.step_ns.sum()
        low, high = np.percentile(steps.speed, (5, 95))
        return (
            f"others took {100 * others:.0f} % of the engine's time ({100 * (1 - 1 / self.taken):.0f} % while it was "
            f"calibrated), and the machine's speed varied by {100 * (high / low - 1):.0f} %"
        )


def _of_neighbours(times: Floats) -> Floats:
    """The sum over the steps around each, without it; of a single step, itself."""
    if len(times) == 1:
        return times
    until = np.concatenate(([0.0], np.cumsum(times)))
    place = np.arange(len(times))
    first, last = np.maximum(place - _NEIGHBOURS, 0), np.minimum(place + _NEIGHBOURS + 1, len(times))
    found: Floats = until[last] - until[first] - times
    return found
