"""What proposes the tokens that a request's next step verifies."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from realengine.copier import Copy
from realengine.kv_budget import KvBudget
from realengine.seating import Seating
from realengine.sequence import TokenSequence
from serving.step_plan import Row


class Drafter(Protocol):
    """Proposes at the end of each step, in the order of its rows. What it proposes can never change an output."""

    def draft(
        self, rows: Sequence[Row], going_on: Collection[int], sequences: Mapping[int, TokenSequence], seating: Seating
    ) -> dict[int, list[int]]:
        """The drafts of those `going_on`, by id: requests that the step, whose rows these are, has sampled for and that
        do not end with it. What it sampled is in their `sequences`. A request without a draft decodes plainly.
        """

    def leave(self, id: int) -> None:
        """The request has ended, or lost its place."""

    def reset(self) -> None:
        """Forget every request."""

    # What a drafter that computes needs of the device

    def budget(self, target: KvBudget) -> KvBudget:
        """The target's, with what drafting takes."""

    def allocate(self, num_blocks: int) -> None:
        """Make room for the KV of so many blocks. Raises UserError when the memory does not suffice."""

    @property
    def block_bytes(self) -> int:
        """What the KV of a block takes beside the target's; 0 where drafting has none."""

    def keep_in_host(self, slots: int) -> None:
        """Make room for so many of its blocks in host memory. Raises UserError if there is none."""

    def copy(self, pairs: Sequence[tuple[int, int]], reads: bool) -> Copy:
        """Begin to copy its blocks, as `ModelRunner.copy`; only where it has some."""

    def warm_up(self) -> None:
        """Run once what drafting is made of."""

    def close(self) -> None:
        """Give back threads and graphs; nothing may be drafted afterwards."""
