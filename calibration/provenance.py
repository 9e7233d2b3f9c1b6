"""The trust in a figure: a mark and its reason.

Marks are the names of `calibration.kernels.times.Coverage` in small letters, as documents and recordings spell them. A
figure without a note has the mark `unknown`. An input that was neither measured nor predicted is `assumed`, and a
figure recorded on the real engine is `measured`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from traces.recording_notes import notes_of

MEASURED, VALIDATED, INTERPOLATED, EXTRAPOLATED, UNKNOWN, ASSUMED = MARKS = (
    "measured",
    "validated",
    "interpolated",
    "extrapolated",
    "unknown",
    "assumed",
)
_FROM_BEST = MARKS[:5]


class Provenance(NamedTuple):
    """A mark and its reason, a clause without a full stop."""

    mark: str
    reason: str

    @property
    def rank(self) -> int:
        """The place of the mark in the order: 0 is the best, and unknown the worst."""
        return _FROM_BEST.index(self.mark) if self.mark in _FROM_BEST else len(_FROM_BEST)


def noted(document: Any, otherwise: str) -> Provenance:
    """Return the `mark` and `reason` of a document, or unknown because of `otherwise` if it has none."""
    if not isinstance(document, Mapping) or document.get("mark") not in _FROM_BEST:
        return Provenance(UNKNOWN, otherwise)
    return Provenance(str(document["mark"]), str(document.get("reason") or "no reason is recorded"))


def of_run(run: Mapping[str, Any]) -> Provenance:
    """Return the provenance of a recording from its row of `runs`.

    A run of the real engine is measured; a simulation notes its own provenance.
    """
    if run["clock"] == "wall":
        return Provenance(MEASURED, "recorded on the real engine")
    if run["clock"] != "virtual":
        return Provenance(UNKNOWN, "the recording does not say whether it was measured or simulated")
    return noted(notes_of(run).get("standing"), "the recording does not say how far its step times can be trusted")


def weakest(provenances: Iterable[Provenance], things: str) -> Provenance:
    """Return the provenance of a figure of several `things` (a plural): the least certain one, with counts."""
    found = list(provenances)
    if not found:
        return Provenance(UNKNOWN, f"there are no {things}")
    worst = max(found, key=lambda provenance: provenance.rank)
    if len(set(found)) == 1:
        return worst
    counts = Counter(provenance.mark for provenance in found)
    counted = ", ".join(f"{counts[mark]:,} {mark}" for mark in reversed(MARKS) if counts[mark])
    return Provenance(worst.mark, f"of {len(found):,} {things} {counted}; for example: {worst.reason}")
