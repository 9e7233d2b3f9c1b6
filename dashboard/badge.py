"""The badge that every figure carries: how far a number can be trusted, with the reason on hover.

Marks are those of `calibration.kernel_times.Mark`; everything read back from JSON or Parquet spells them in small
letters.
"""

from __future__ import annotations

from typing import Any

import streamlit as st

_SHOWN = {
    "validated": ("green", "verified"),
    "interpolated": ("blue", "linear_scale"),
    "extrapolated": ("orange", "explore"),
}
_MEANING = {
    "validated": "Measured: this very shape was timed, or the whole was held against a real run.",
    "interpolated": "Between measured shapes.",
    "extrapolated": "Beyond measured shapes: what a model makes of the nearest that were measured.",
}


def mark_badge(mark: str) -> str:
    """The badge as Markdown, to stand within a line; a mark of no known name is shown grey."""
    colour, icon = _SHOWN.get(mark.lower(), ("gray", "help"))
    return f":{colour}-badge[:material/{icon}: {mark.lower()}]"


def badge(mark: str, reason: str, place: Any = st) -> None:
    """The badge on a line of its own, with `reason` and what the mark means on hover."""
    meaning = _MEANING.get(mark.lower(), "")
    place.markdown(mark_badge(mark), help=f"{reason[:1].upper()}{reason[1:]}.\n\n{meaning}".strip())
