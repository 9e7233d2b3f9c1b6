"""What proposes the tokens that a request's next step verifies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from realengine.sequence import TokenSequence
from serving.step_plan import Row


class Drafter(Protocol):
    """Proposes at the end of each step, in the order of its rows. What it proposes can never change an output."""

    def draft(self, rows: Sequence[Row], sequences: Mapping[int, TokenSequence]) -> dict[int, list[int]]:
        """The drafts of the requests that the step sampled for, by id; a request without one decodes plainly.

        `rows` are those of the step whose requests go on, with what it sampled in their `sequences`.
        """
        ...

    def leave(self, id: int) -> None:
        """The request has ended, or lost its place."""
        ...

    def reset(self) -> None:
        """Forget every request."""
        ...
