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


def named(parameter: str) -> str | None:
    """The query parameter, or what it was when this tab last showed the page: going away and back changes nothing."""
    text: str | None = st.query_params.get(parameter, st.session_state.get(f"last_{parameter}"))
    return text


def keep(parameter: str, text: str, otherwise: str = "") -> None:
    """Have the query parameter say `text`; left out when that is what holds without it."""
    st.session_state[f"last_{parameter}"] = text
    if text != otherwise:
        st.query_params[parameter] = text
    elif parameter in st.query_params:
        del st.query_params[parameter]


def choose_many(
    label: str, options: Sequence[str], parameter: str, otherwise: Sequence[str], help: str | None = None
) -> list[str]:
    """A choice of any number of options, separated by commas in the URL; names of no option are passed over."""
    said = named(parameter)
    wanted = [name for name in (otherwise if said is None else said.split(",")) if name in options]
    chosen: list[str] = st.multiselect(label, options, wanted, help=help, key=f"url_{parameter}")
    keep(parameter, ",".join(chosen), ",".join(otherwise))
    return chosen


def amount(
    label: str,
    parameter: str,
    low: float,
    high: float,
    otherwise: float,
    step: float,
    help: str | None = None,
    show: str = "%.6g",
) -> float:
    """A number that is the query parameter; `otherwise` when that is absent or no such number."""
    try:
        said = float(named(parameter) or "nan")
    except ValueError:
        said = otherwise
    value = said if low <= said <= high else otherwise
    ends = float(low), float(high), float(value), float(step)
    chosen = float(st.number_input(label, *ends, format=show, help=help, key=f"url_{parameter}"))
    keep(parameter, f"{chosen:.10g}", f"{otherwise:.10g}")
    return chosen


def pick(
    label: str, options: Sequence[str], parameter: str, show: Callable[[str], str] = str, help: str | None = None
) -> str:
    """One of a few options, side by side; the first without the parameter."""
    said = named(parameter)
    wanted = said if said is not None and said in options else options[0]
    chosen = st.segmented_control(
        label, options, default=wanted, format_func=show, help=help, key=f"url_{parameter}", width="stretch"
    )
    keep(parameter, chosen or wanted, options[0])
    return chosen or wanted


def interval(label: str, low: float, high: float, parameter: str, help: str | None = None) -> tuple[float, float]:
    """A range slider whose ends are the query parameter `parameter`, `LOW-HIGH`; absent when it is the whole range."""
    key = _interval_key(low, high, parameter)
    if key not in st.session_state:
        st.session_state[key] = _ends(st.query_params.get(parameter, ""), low, high)
    step = round((high - low) / 200, 3) or 0.001
    chosen: tuple[float, float] = st.slider(label, low, high, step=step, help=help, key=key)
    if chosen == (low, high):
        if parameter in st.query_params:
            del st.query_params[parameter]
    else:
        st.query_params[parameter] = f"{chosen[0]:g}-{chosen[1]:g}"
    return chosen


def set_interval(low: float, high: float, parameter: str, ends: tuple[float, float]) -> None:
    """Move the slider of `interval`, from the callback of another widget; `ends` outside the range are cut to it."""
    begin, end = max(low, min(ends)), min(high, max(ends))
    if begin < end:
        st.session_state[_interval_key(low, high, parameter)] = (begin, end)


def _interval_key(low: float, high: float, parameter: str) -> str:
    return f"url_{parameter}_{low:g}_{high:g}"


def _ends(text: str, low: float, high: float) -> tuple[float, float]:
    first, _, second = text.partition("-")
    try:
        begin, end = max(low, float(first)), min(high, float(second))
    except ValueError:
        return low, high
    return (begin, end) if begin < end else (low, high)
