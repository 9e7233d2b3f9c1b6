"""KV of a target and of its draft model, in blocks of the same ids, copied as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from realengine.copier import Copy
from realengine.drafting.drafter import Drafter
from realengine.host_tier import Memory


class DraftedKv(NamedTuple):
    """Of both."""

    target: Memory
    drafter: Drafter

    def keep_in_host(self, slots: int) -> None:
        self.target.keep_in_host(slots)
        self.drafter.keep_in_host(slots)

    def copy(self, pairs: Sequence[tuple[int, int]], reads: bool) -> Copy:
        return _Copies(self.drafter.copy(pairs, reads), self.target.copy(pairs, reads))


class _Copies(NamedTuple):
    draft: Copy
    target: Copy

    def done(self) -> bool:
        return self.draft.done() and self.target.done()

    def times_ns(self) -> tuple[int, int]:
        """From when the first began to when the last ended."""
        (began_ns, ended_ns), (target_began_ns, target_ended_ns) = self.draft.times_ns(), self.target.times_ns()
        return min(began_ns, target_began_ns), max(ended_ns, target_ended_ns)
