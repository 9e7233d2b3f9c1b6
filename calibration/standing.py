"""How far a figure can be trusted: a mark and the reason for it, of what the figure is drawn from.

Marks are those of `calibration.kernel_times.Mark` in small letters, as documents and recordings spell them. Where
nothing is noted the mark is `unknown`; what was neither measured nor predicted, but only asked for, is `assumed`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from traces.recording_notes import notes_of

if TYPE_CHECKING:
    from calibration.explanation import ExplainedOperation

VALIDATED, INTERPOLATED, EXTRAPOLATED, UNKNOWN, ASSUMED = MARKS = (
    "validated",
    "interpolated",
    "extrapolated",
    "unknown",
    "assumed",
)
_FROM_BEST = MARKS[:4]
_LIES = {
    VALIDATED: "was measured",
    INTERPOLATED: "lies between measured shapes",
    EXTRAPOLATED: "lies beyond measured shapes",
}


class Standing(NamedTuple):
    """A mark and its reason, a clause without a full stop."""

    mark: str
    reason: str

    @property
    def rank(self) -> int:
        """0 for the best; what is unknown is worst."""
        return _FROM_BEST.index(self.mark) if self.mark in _FROM_BEST else len(_FROM_BEST)


def noted(document: Any, otherwise: str) -> Standing:
    """What a document says as `mark` and `reason`; unknown because of `otherwise` where it does not."""
    if not isinstance(document, Mapping) or document.get("mark") not in _FROM_BEST:
        return Standing(UNKNOWN, otherwise)
    return Standing(str(document["mark"]), str(document.get("reason") or "no reason is recorded"))


def of_run(run: Mapping[str, Any]) -> Standing:
    """Of a recording, by its row of `runs`: what ran on the real engine is measured; a simulation notes its own."""
    if run["clock"] == "wall":
        return Standing(VALIDATED, "measured on the real engine")
    if run["clock"] != "virtual":
        return Standing(UNKNOWN, "the recording does not say whether it was measured or simulated")
    return noted(notes_of(run).get("standing"), "the recording does not say how far its step times can be trusted")


def of_operation(operation: ExplainedOperation) -> Standing:
    """Of one kind of kernel in a step."""
    mark = operation.mark.name.lower()
    return Standing(mark, f"{operation.name} {_LIES[mark]}")


def together(standings: Iterable[Standing], things: str) -> Standing:
    """Of a figure of several `things` (a plural): that of the least certain, and how many have which mark."""
    found = list(standings)
    if not found:
        return Standing(UNKNOWN, f"there are no {things}")
    worst = max(found, key=lambda standing: standing.rank)
    if len(set(found)) == 1:
        return worst
    counts = Counter(standing.mark for standing in found)
    told = ", ".join(f"{counts[mark]:,} {mark}" for mark in reversed(MARKS) if counts[mark])
    return Standing(worst.mark, f"of {len(found):,} {things} {told}; for example: {worst.reason}")
