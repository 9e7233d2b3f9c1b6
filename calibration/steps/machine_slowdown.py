"""The slowdown of a machine: an engine is slower for causes outside of it, which cannot be predicted.

There are two kinds. Other processes take the CPU: their share is the wall time that is not CPU time of the engine's
thread. And the CPU time itself is longer if memory, caches or clocks are slower, which the recorded `speed` shows. The
slowdown at a step does not depend on the step's own duration: the share of other processes comes from the neighbouring
steps, and the speed is measured before and after the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokentwin.calibration.steps.features import Floats, MeasuredSteps, sums_around
from tokentwin.calibration.steps.interval import REACH
from tokentwin.serving.answers.figures import shown_percent, shown_share

_STRETCH = 10  # number of successive steps whose errors are sampled together
_NEIGHBOURS = 5  # number of steps on each side from which the share of other processes is computed


@dataclass(frozen=True)
class MachineSlowdown:
    """The slowdown of the machine during a calibration, which its prices include.

    Attributes:
        taken: ratio of wall time to CPU time of the steps
        speed: median recorded speed
        exponent: the CPU time of a step is proportional to (`speed` / speed of the step) ** `exponent`
        compute_exponent: the exponent of the time that a step computes; `exponent` is then that of the rest. None if
            there is one exponent for all
        compute_shares: the share of computing in a step, by its number of tokens
        interval: factors of the predicted time between which 90 % of runs lie if the machine's speed is known
        misses: log ratio of measured to predicted time of each measured step in order, with the machine's speed known;
            the error of a single step that the slowdown around it does not explain
    """

    taken: float
    speed: float
    exponent: float
    interval: tuple[float, float] = (1.0, 1.0)
    misses: tuple[float, ...] = ()
    compute_exponent: float | None = None
    compute_shares: tuple[tuple[float, float], ...] = ()

    def slowness(self, steps: MeasuredSteps) -> Floats:
        """Return the ratio of each step's CPU time to that at the calibration's speed, `[steps]`."""
        slower = self.speed / steps.speed
        if self.compute_exponent is None or not self.compute_shares:
            return slower**self.exponent
        knots, shares = np.array(self.compute_shares).T
        share = np.interp(np.log2(np.maximum(steps.sizes.tokens, 1.0)), np.log2(knots), shares)
        return np.asarray(share * slower**self.compute_exponent + (1.0 - share) * slower**self.exponent)

    def own_ns(self, predicted_ns: Floats, steps: MeasuredSteps) -> Floats:
        """Return each step's CPU time `[steps]` at its machine speed, given the time `predicted_ns` by prices."""
        return predicted_ns / self.taken * self.slowness(steps)

    def slowdown(self, steps: MeasuredSteps) -> Floats:
        """Return the factor by which each step is slower than the calibration predicts, `[steps]`.

        It is rounded to six decimals, because further decimals differ between CPUs.
        """
        taken = np.empty(len(steps))
        for index in range(steps.recording[-1] + 1):
            mine = steps.recording == index
            taken[mine] = _of_neighbours(steps.step_ns[mine]) / _of_neighbours(steps.own_ns[mine])
        return np.round(taken / self.taken * self.slowness(steps), 6)

    def drawn(self, slowdown: Floats, rng: np.random.Generator) -> Floats:
        """Draw a random variation of `slowdown` `[steps]` from the errors of predictions with the speed known.

        All steps are multiplied by one factor drawn from the interval, and each step by a factor of `misses`. The
        factors of successive steps are drawn as one stretch, because the errors of neighbouring steps are similar
        (moving-block bootstrap, Künsch 1989).
        """
        misses = np.array(self.misses or (0.0,))
        stretches = -(-len(slowdown) // _STRETCH)
        first = rng.integers(0, max(len(misses) - _STRETCH, 0) + 1, stretches)
        places = (first[:, None] + np.arange(_STRETCH)).ravel()[: len(slowdown)] % len(misses)
        spread = np.log(self.interval[1] / self.interval[0]) / (2 * REACH)
        return np.round(slowdown * np.exp(spread * rng.standard_normal() + misses[places]), 6)

    def clause(self, steps: MeasuredSteps) -> str:
        """Return a clause that describes the slowdown of `steps`."""
        others = 1 - steps.own_ns.sum() / steps.step_ns.sum()
        low, high = np.percentile(steps.speed, (5, 95))
        return (
            f"others took {shown_share(others)} of the engine's time ({shown_share(1 - 1 / self.taken)} while it was "
            f"calibrated), and the machine's speed varied by {shown_percent(100 * (high / low - 1), 0)}"
        )


def _of_neighbours(times: Floats) -> Floats:
    """Return for each step the summed time of its neighbours; for the only step of a run, its own time."""
    return times if len(times) == 1 else sums_around(times, _NEIGHBOURS)[0] - times
