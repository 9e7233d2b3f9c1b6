"""How far a figure can be trusted: a mark and the reason for it, of what the figure is drawn from.

Marks are those of `calibration.kernels.times.Coverage` in small letters, as documents and recordings spell them. Where
nothing is noted the mark is `unknown`; what was neither measured nor predicted, but is an input, is `assumed`; what was
recorded on the real engine is `measured`.
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
        """0 for the best; what is unknown is worst."""
        return _FROM_BEST.index(self.mark) if self.mark in _FROM_BEST else len(_FROM_BEST)


def noted(document: Any, otherwise: str) -> Provenance:
    """What a document says as `mark` and `reason`; unknown because of `otherwise` where it does not."""
    if not isinstance(document, Mapping) or document.get("mark") not in _FROM_BEST:
        return Provenance(UNKNOWN, otherwise)
    return Provenance(str(document["mark"]), str(document.get("reason") or "no reason is recorded"))


def of_run(run: Mapping[str, Any]) -> Provenance:
    """Of a recording, by its row of `runs`: what ran on the real engine is measured; a simulation notes its own."""
    if run["clock"] == "wall":
        return Provenance(MEASURED, "recorded on the real engine")
    if run["clock"] != "virtual":
        return Provenance(UNKNOWN, "the recording does not say whether it was measured or simulated")
    return noted(notes_of(run).get("standing"), "the recording does not say how far its step times can be trusted")


def weakest(provenances: Iterable[Provenance], things: str) -> Provenance:
    """Of a figure of several `things` (a plural): that of the least certain, and how many have which mark."""
    found = list(provenances)
    if not found:
        return Provenance(UNKNOWN, f"there are no {things}")
    worst = max(found, key=lambda provenance: provenance.rank)
    if len(set(found)) == 1:
        return worst
    counts = Counter(provenance.mark for provenance in found)
    counted = ", ".join(f"{counts[mark]:,} {mark}" for mark in reversed(MARKS) if counts[mark])
    return Provenance(worst.mark, f"of {len(found):,} {things} {counted}; for example: {worst.reason}")
