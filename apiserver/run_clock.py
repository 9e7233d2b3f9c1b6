"""The clock of a twin's run: simulated time follows the machine's time, and pauses where the machine stalls."""

from __future__ import annotations

import math
from bisect import bisect_right

_MOST_PAUSES = 10_000  # number of pauses that are kept


class RunClock:
    """A conversion between the monotonic clock and the times of a run that begins at `origin_ns`.

    With `speed` 10, ten simulated seconds pass in a real second. If the machine stalls, the run pauses as long, so that
    the tokens of the stall are sent at their usual intervals afterwards, not in one burst. Times
    before the last 10,000 pauses are converted as if all earlier pauses had come before them.
    """

    def __init__(self, origin_ns: int, speed: float = 1.0) -> None:
        self.stalled_ns = 0  # duration of all pauses, in real time
        self._origin_ns = origin_ns
        self._speed = speed
        self._begins: list[int] = []  # real time at which each pause begins
        self._run_begins: list[int] = []  # its time of the run
        self._totals = [0]  # duration of the pauses before each, and of all

    def pause(self, at_run_ns: float, end_ns: int) -> None:
        """Let the run pause at `at_run_ns`, after the last pause, until the real time `end_ns`."""
        begin_ns = self.monotonic_ns(at_run_ns)
        self.stalled_ns += end_ns - begin_ns
        run_begin = math.ceil(at_run_ns)
        if self._run_begins and self._run_begins[-1] == run_begin:  # no time of the run has passed since the last pause
            self._totals[-1] = self.stalled_ns
            return
        self._run_begins.append(run_begin)
        self._begins.append(begin_ns)
        self._totals.append(self.stalled_ns)
        if len(self._begins) > _MOST_PAUSES:
            del self._run_begins[0], self._begins[0], self._totals[0]

    def run_ns(self, monotonic_ns: int) -> int:
        """Return the time of the run at a real time; within a pause, the time at which the run paused."""
        pauses = bisect_right(self._begins, monotonic_ns)
        run_ns = round((monotonic_ns - self._origin_ns - self._totals[pauses]) * self._speed)
        return max(run_ns, self._run_begins[pauses - 1]) if pauses else run_ns

    def monotonic_ns(self, run_ns: float) -> int:
        """Return the real time at which the run has reached `run_ns`: after a pause that begins there."""
        pauses = bisect_right(self._run_begins, run_ns)
        return round(self._origin_ns + run_ns / self._speed) + self._totals[pauses]
