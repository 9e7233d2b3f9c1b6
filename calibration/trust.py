"""The trust in a figure: a level and its reason.

A figure without a note has the level `unknown`. An input that was neither measured nor predicted is `assumed`, and a
figure recorded on the real engine is `measured`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any, NamedTuple

from tokentwin.traces.recording import notes_of

MEASURED, VALIDATED, INTERPOLATED, EXTRAPOLATED, UNKNOWN, ASSUMED = LEVELS = (
    "measured",
    "validated",
    "interpolated",
    "extrapolated",
    "unknown",
    "assumed",
)  # from best to worst


class TrustLevel(IntEnum):
    """The trust level of a predicted time as a number, for arrays; the greatest number is the worst level.

    The level of a sum is that of its worst part, and the level of an empty sum is unknown.
    """

    UNKNOWN = -1  # no time was needed
    VALIDATED = 0  # the shape itself was measured, or the whole was compared with a run
    INTERPOLATED = 1  # the shape lies between measured ones
    EXTRAPOLATED = 2  # the shape lies beyond measured ones

    @property
    def word(self) -> str:
        """The level as a word of `LEVELS`."""
        return self.name.lower()

    @property
    def clause(self) -> str:
        """A clause about steps whose least certain kernel has this level."""
        return {
            0: "every kernel was measured at this size",
            1: "some kernels were measured at smaller and larger sizes, and not at this one",
            2: "some kernels were not measured at such sizes",
        }[self]


class Trust(NamedTuple):
    """A level out of `LEVELS`, and its reason: a clause without a full stop."""

    level: str
    reason: str

    @property
    def rank(self) -> int:
        """The index of the level in `LEVELS`; 0 is the best level."""
        return LEVELS.index(self.level)


def noted_trust(level: Any, reason: Any, otherwise: str) -> Trust:
    """Return the trust noted in a document, or `unknown` with the reason `otherwise` if it has no valid level."""
    if level not in LEVELS:
        return Trust(UNKNOWN, otherwise)
    return Trust(level, str(reason or "no reason is recorded"))


def trust_in_run(run: Mapping[str, Any]) -> Trust:
    """Return the trust in a recording from its row of `runs`.

    A run of the real engine is measured. A simulated run has a note about its trust.
    """
    if run["clock"] == "wall":
        return Trust(MEASURED, "recorded on the real engine")
    if run["clock"] != "virtual":
        return Trust(UNKNOWN, "the recording does not say whether it was measured or simulated")
    noted = notes_of(run).get("trust") or {}
    otherwise = "the recording does not say how far its step times can be trusted"
    return noted_trust(noted.get("level"), noted.get("reason"), otherwise)


def least_certain(trusts: Iterable[Trust]) -> Trust:
    """Return the trust in a simulation with several cost models; a model that priced no step does not count."""
    return max(trusts, key=lambda trust: -1 if trust.level == UNKNOWN else trust.rank)


def weakest(trusts: Iterable[Trust], things: str) -> Trust:
    """Return the trust in a figure made of several `things` (a plural noun): the worst trust, with counts by level."""
    trusts = list(trusts)
    if not trusts:
        return Trust(UNKNOWN, f"there are no {things}")
    worst = max(trusts, key=lambda trust: trust.rank)
    if len(set(trusts)) == 1:
        return worst
    counts = Counter(trust.level for trust in trusts)
    counted = ", ".join(f"{counts[level]:,} {level}" for level in reversed(LEVELS) if counts[level])
    alike = f"both {things}" if len(trusts) == 2 else f"all {len(trusts):,} {things}"
    said = f"of {len(trusts):,} {things} {counted}" if len(counts) > 1 else alike
    return Trust(worst.level, f"{said}; for example: {worst.reason}")
