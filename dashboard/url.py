"""Inputs live in the URL: share the link, get the same page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import streamlit as st


def choose(
    label: str,
    options: Sequence[str],
    parameter: str,
    show: Callable[[str], str] = str,
    help: str | None = None,
) -> str:
    """A select box whose choice is the query parameter `parameter`; a name that is not an option is said to be so.

    Without the parameter it is what was chosen last, so that going to another page and back changes nothing.
    """
    named = st.query_params.get(parameter)
    if named is not None and named not in options and f"url_{parameter}" not in st.session_state:
        st.info(f"There is no {label.lower()} {named[:80]!r} here (any more); this is another.")
    wanted = named if named in options else st.session_state.get(f"last_{parameter}")
    index = options.index(wanted) if wanted in options else 0
    chosen = st.selectbox(label, options, index=index, format_func=show, help=help, key=f"url_{parameter}")
    st.session_state[f"last_{parameter}"] = chosen
    if named != chosen:
        st.query_params[parameter] = chosen
    return chosen


def switch(label: str, parameter: str, help: str | None = None) -> bool:
    """A toggle that is on while the query parameter is `1`."""
    on = st.toggle(label, value=st.query_params.get(parameter) == "1", help=help, key=f"url_{parameter}")
    if on:
        st.query_params[parameter] = "1"
    elif parameter in st.query_params:
        del st.query_params[parameter]
    return on


def number(label: str, parameter: str, low: int, high: int, otherwise: int, help: str | None = None) -> int:
    """A whole number that is the query parameter `parameter`; `otherwise` when that is absent or no such number."""
    named = st.query_params.get(parameter, "")
    value = min(max(int(named), low), high) if named.isascii() and named.isdigit() else otherwise
    chosen = int(st.number_input(label, low, high, value, help=help, key=f"url_{parameter}"))
    if chosen != otherwise:
        st.query_params[parameter] = str(chosen)
    elif parameter in st.query_params:
        del st.query_params[parameter]
    return chosen


def interval(label: str, low: float, high: float, parameter: str, help: str | None = None) -> tuple[float, float]:
    """A range slider whose ends are the query parameter `parameter`, `LOW-HIGH`; absent when it is the whole range."""
    begin, end = _ends(st.query_params.get(parameter, ""), low, high)
    step = round((high - low) / 200, 3) or 0.001
    chosen: tuple[float, float] = st.slider(
        label, low, high, (begin, end), step=step, help=help, key=f"url_{parameter}_{low:g}_{high:g}"
    )
    if chosen == (low, high):
        if parameter in st.query_params:
            del st.query_params[parameter]
    else:
        st.query_params[parameter] = f"{chosen[0]:g}-{chosen[1]:g}"
    return chosen


def _ends(text: str, low: float, high: float) -> tuple[float, float]:
    first, _, second = text.partition("-")
    try:
        begin, end = max(low, float(first)), min(high, float(second))
    except ValueError:
        return low, high
    return (begin, end) if begin < end else (low, high)
