"""A server that can be asked."""

from __future__ import annotations

from typing import Protocol

from tokentwin.planning.learn.answers import Answer
from tokentwin.planning.learn.questions import Question


class TimeIsUp(Exception):
    """The time for questions is over."""


class Server(Protocol):
    """A server that answers questions."""

    def ask(self, question: Question) -> Answer:
        """Send the question's workload and return what its client saw. Raises TimeIsUp if no time is left."""
        ...
