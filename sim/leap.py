"""A leap: a run of pure decode steps whose plans, starts and ends are all known when the first step begins."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate

from tokentwin.serving.step_prices import DecodeRun


class Leap:
    """A run of steps that take `durations_ns`, each including `cpu_ns` of planning; the first is planned at `began_ns`.

    In the overlapped loop a step is in flight at the begin, and ends at `in_flight_until_ns`. Each step then starts
    when it has been planned and the step before has ended, and at this time the next step is planned. The turn of a
    step is the time from which the leap counts it as taken, and at which the next step is planned.
    """

    __slots__ = ("_ends_ns", "_origin_ns", "_run", "_turns_ns", "began_ns", "cpu_ns", "overlaps", "steps")

    def __init__(self, durations_ns: Iterable[int], began_ns: int, cpu_ns: int, in_flight_until_ns: int | None) -> None:
        self.began_ns = self._origin_ns = began_ns
        self.cpu_ns = cpu_ns
        self.overlaps = in_flight_until_ns is not None
        self._turns_ns: list[int] = []  # turn and end of each step, if they are listed
        self._ends_ns: list[int] = []
        # durations from `_origin_ns` on; they exclude planning time that the overlapped loop hides
        self._run: DecodeRun | None = None
        if in_flight_until_ns is not None:
            self._origin_ns = max(began_ns + cpu_ns, in_flight_until_ns)
        if isinstance(durations_ns, DecodeRun):
            if not self.overlaps:
                self._run = durations_ns
            elif durations_ns.shortest_ns() >= 2 * cpu_ns:  # every step is longer than the planning of the next
                self._run = durations_ns.longer(-cpu_ns)
            self.steps = durations_ns.steps
        if self._run is None:
            self._list(durations_ns)
            self.steps = len(self._ends_ns)

    def _list(self, durations_ns: Iterable[int]) -> None:
        if not self.overlaps:
            self._ends_ns = self._turns_ns = list(accumulate(durations_ns, initial=self._origin_ns))
            del self._ends_ns[0]
            return
        now, cpu_ns = self._origin_ns, self.cpu_ns
        for duration in durations_ns:
            end = now + duration - cpu_ns
            self._turns_ns.append(now)
            self._ends_ns.append(end)
            now = max(now + cpu_ns, end)

    def turns_ns(self, steps: int) -> list[int]:
        """Return the turn of each of the first `steps` steps."""
        if self._run is None:
            return self._turns_ns[:steps]
        ends_ns = self.ends_ns(steps)
        return [self._origin_ns, *ends_ns[:-1]] if self.overlaps else ends_ns

    def ends_ns(self, steps: int) -> list[int]:
        """Return when each of the first `steps` steps ends."""
        if self._run is None:
            return self._ends_ns[:steps]
        ends_ns = list(accumulate(self._run.durations_ns(steps), initial=self._origin_ns))
        del ends_ns[0]
        return ends_ns

    def ended(self, now_ns: int) -> int:
        """Return how many steps have had their turn by `now_ns`."""
        if self._run is None:
            return bisect_right(self._turns_ns, now_ns)
        if not self.overlaps:
            return self._run.ended(now_ns - self._origin_ns)
        return 0 if now_ns < self._origin_ns else min(self._run.ended(now_ns - self._origin_ns) + 1, self.steps)

    def turn_ns(self, step: int) -> int:
        if self._run is None:
            return self._turns_ns[step]
        return self._origin_ns + self._run.until(step if self.overlaps else step + 1)

    def end_ns(self, step: int) -> int:
        return self._ends_ns[step] if self._run is None else self._origin_ns + self._run.until(step + 1)

    def plan_ns(self, step: int) -> int:
        return self.turn_ns(step - 1) if step else self.began_ns

    def start_ns(self, step: int) -> int:
        return self.turn_ns(step) if self.overlaps else self.plan_ns(step) + self.cpu_ns
