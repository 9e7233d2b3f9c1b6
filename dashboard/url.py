"""Inputs live in the URL: share the link, get the same page.

What a link says is not to be trusted: names are looked up among the options, numbers held against their ends, and
anything else is as if it were not there.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence

import streamlit as st

_ENDS = re.compile(r"(-?[\d.]+(?:e[+-]?\d+)?)-(-?[\d.]+(?:e[+-]?\d+)?)")


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
    on = st.toggle(label, value=named(parameter) == "1", help=help, key=f"url_{parameter}")
    keep(parameter, "1" if on else "")
    return on


def number(
    label: str, parameter: str, low: int, high: int, otherwise: int, step: int = 1, help: str | None = None
) -> int:
    """A whole number that is the query parameter `parameter`; `otherwise` when that is absent or no such number."""
    value = int(quantity(named(parameter), low, high, otherwise))
    chosen = int(st.number_input(label, low, high, value, step, help=help, key=f"url_{parameter}"))
    keep(parameter, str(chosen), str(otherwise))
    return chosen


def quantity(text: str | None, low: float, high: float, otherwise: float) -> float:
    """The number that a link gives; `otherwise` where it gives none from `low` to `high`."""
    try:
        value = float(text or "nan")
    except ValueError:
        return otherwise
    return value if low <= value <= high else otherwise


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
    """A choice of any number of options, in the URL as a line of CSV; names of no option are passed over."""
    said = named(parameter)
    names = otherwise if said is None else _listed(said)
    wanted = list(dict.fromkeys(name for name in names if name in options))
    chosen: list[str] = st.multiselect(label, options, wanted, help=help, key=f"url_{parameter}")
    keep(parameter, _line(chosen), _line(otherwise))
    return chosen


def _line(names: Sequence[str]) -> str:
    """`H100,H200`; a name with a comma in it is quoted."""
    out = io.StringIO()
    csv.writer(out, lineterminator="").writerow(names)
    return out.getvalue()


def _listed(line: str) -> list[str]:
    try:
        return next(csv.reader([line]), [])
    except csv.Error:
        return []


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
    value = quantity(named(parameter), low, high, otherwise)
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
        st.query_params[parameter] = f"{chosen[0]:.10g}-{chosen[1]:.10g}"
    return chosen


def set_interval(low: float, high: float, parameter: str, ends: tuple[float, float]) -> None:
    """Move the slider of `interval`, from the callback of another widget; `ends` outside the range are cut to it."""
    begin, end = max(low, min(ends)), min(high, max(ends))
    if begin < end:
        st.session_state[_interval_key(low, high, parameter)] = (begin, end)


def _interval_key(low: float, high: float, parameter: str) -> str:
    return f"url_{parameter}_{low:g}_{high:g}"


def _ends(text: str, low: float, high: float) -> tuple[float, float]:
    said = _ENDS.fullmatch(text)
    try:
        begin, end = (low, high) if said is None else map(float, said.groups())
    except ValueError:  # 1.2.3
        return low, high
    return (max(low, begin), min(high, end)) if max(low, begin) <= min(high, end) else (low, high)
