"""What stands in the place of a request while an input is still missing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Incomplete:
    """Something is still to be given: what, in a sentence."""

    what: str
