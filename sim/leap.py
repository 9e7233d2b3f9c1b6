"""A run of pure decode steps, known from its begin: when each is planned, starts and ends."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate


class Leap:
    """Steps that take `durations_ns` each, planning of `cpu_ns` included, the first planned at `began_ns`.

    With a step in flight, which ends at `in_flight_until_ns`, each begins when it has been planned and the one before
    has ended; then the next is planned.

    turns_ns  when each has been taken in and the next is planned
    ends_ns   when each ends
    """

    __slots__ = ("began_ns", "cpu_ns", "ends_ns", "overlaps", "turns_ns")

    def __init__(self, durations_ns: Iterable[int], began_ns: int, cpu_ns: int, in_flight_until_ns: int | None) -> None:
        self.began_ns = began_ns
        self.cpu_ns = cpu_ns
        self.overlaps = in_flight_until_ns is not None
        if in_flight_until_ns is None:
            self.ends_ns = self.turns_ns = list(accumulate(durations_ns, initial=began_ns))
            del self.ends_ns[0]
            return
        self.turns_ns, self.ends_ns = [], []
        now, end = began_ns, in_flight_until_ns
        for duration in durations_ns:
            now = max(now + cpu_ns, end)
            end = now + duration - cpu_ns
            self.turns_ns.append(now)
            self.ends_ns.append(end)

    def ended(self, now_ns: int) -> int:
        """How many steps have been taken in by then."""
        return bisect_right(self.turns_ns, now_ns)

    def plan_ns(self, step: int) -> int:
        return self.turns_ns[step - 1] if step else self.began_ns

    def start_ns(self, step: int) -> int:
        return self.turns_ns[step] if self.overlaps else self.plan_ns(step) + self.cpu_ns
