"""A summary in words of how the requests of a run ended.

It matters because a run that loses most of its requests looks fast by the latencies of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from serving.figures import shown_share
from traces.metrics.run_metrics import RunMetrics

ENOUGH = 0.99  # share of the requests that must finish for their latencies to describe the run


def status_word(status: str) -> str:
    """Return a status of the dataset `requests` in words."""
    return status.replace("_", " ")


@dataclass(frozen=True)
class RequestEndings:
    """Number of requests by final status, largest number first."""

    counts: Mapping[str, int]

    @classmethod
    def from_metrics(cls, metrics: RunMetrics) -> RequestEndings:
        return cls(metrics.statuses())

    @property
    def text(self) -> str:
        """The number of requests by final status, as text."""
        return ", ".join(f"{count:,} {status_word(status)}" for status, count in self.counts.items())

    @property
    def shortfall(self) -> str | None:
        """The share of requests that did not finish, if it is more than 1 %."""
        if self._finished >= ENOUGH * self._count:
            return None
        share = f"{shown_share(1 - self._finished / self._count, 1)} did not finish"
        return share if self._finished else "no request finished"

    @property
    def latencies_of(self) -> str:
        """A clause that says how many requests the latencies cover."""
        if not self._finished:
            return "there are no latencies"
        return f"latencies are those of the {self._finished:,} of {self._count:,} requests that finished"

    @property
    def _finished(self) -> int:
        return self.counts.get("finished", 0)

    @property
    def _count(self) -> int:
        return sum(self.counts.values())
