"""Two answers or runs beside each other: a pinned one, A; the page's own, B; and their difference in the middle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import streamlit as st

from tokentwin.dashboard import blocks
from tokentwin.dashboard.shown import literal
from tokentwin.dashboard.url import go_to, named
from tokentwin.serving.answers.figures import NOTHING, shown_change
from tokentwin.serving.answers.report import FIGURE, Column, Table

One = TypeVar("One")
_CALLED = {"gpus": "GPUs", "slos": "SLOs", "tensor_parallel_sizes": "tensor parallel", "vary": "engine settings"}


class Shown(NamedTuple):
    """A number, as it is shown; a `share` differs in points, other numbers in percent."""

    value: float | None
    shown: str
    share: bool = False


class Side(NamedTuple):
    """One of two: its name, its settings, and its figures by name."""

    name: str
    settings: Mapping[str, Any]
    figures: Mapping[str, Shown]


def pinned(kind: str, name: str, find: Callable[[str], One | None]) -> One | None:
    """Return what the link pins, if it is another than `name`; otherwise draw a button that pins `name`.

    `kind` is what is pinned, in a word. `find` returns None for an unknown name.
    """
    said = named("pin")
    other = find(said) if said and said != name else None
    if other is None and said == name:
        st.caption(f"This {kind} is pinned as A. Look at another {kind}, and it stands beside this one.")
    elif other is None:
        st.button(f"Pin this {kind} as A", "pin", on_click=go_to, kwargs={"pin": name}, icon=":material/keep:")
    return other


def show_beside(kind: str, a: Side, b: Side) -> None:
    """Draw the pinned A beside B, and a button that removes the pin."""
    blocks.heading(f"The pinned {kind} beside this one", None)
    for letter, side in (("A", a), ("B", b)):
        st.caption(f"{letter}: {literal(side.name)}")
    st.caption(f"Different inputs: {literal(differing(a.settings, b.settings)) or 'none'}.")
    blocks.table(beside(a.figures, b.figures))
    st.button("Unpin A", "unpin", on_click=go_to, kwargs={"pin": ""}, icon=":material/keep_off:")


def beside(a: Mapping[str, Shown], b: Mapping[str, Shown]) -> Table:
    """Return the figures of A and B with the change from A to B between them."""
    rows = [(name, a[name].shown, _change(a[name], b[name]), b[name].shown) for name in a]
    columns = (Column("figure"), Column("A", FIGURE), Column("B against A", FIGURE), Column("B", FIGURE))
    return Table(columns, rows)


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Return the names of the settings that differ."""
    names = [name for name in {**a, **b} if a.get(name) != b.get(name)]
    return ", ".join(_CALLED.get(name, name.replace("_", " ")) for name in names)


def _change(a: Shown, b: Shown) -> str:
    if a.value is None or b.value is None:
        return "" if a.shown == b.shown else "other"
    if a.value == b.value:
        return "the same"
    if a.share:
        return shown_change(100 * (b.value - a.value), unit=" points")
    return shown_change(100 * (b.value / a.value - 1)) if a.value else NOTHING
