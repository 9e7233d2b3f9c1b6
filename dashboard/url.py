"""Inputs live in the URL: share the link, get the same page; go back, and get the page as it was.

A page, drawn by a function that is `in_url`, writes all its parameters at once and only when it is complete: one change
by a person is one entry of the browser's history. What is as usual is left out. Where the address says something else
than was last written (a link, back, forward), the address holds; otherwise the widget.

A widget is told what it begins with in every drawing, and is another one (`fresh_key`) when the address moves. It is
never set through `st.session_state`: Streamlit tells the browser of that once, and where a quick person cuts that very
drawing short, the browser begins the widget with its lowest value or first option, and says that they chose it.

A page that is come to without any parameter, by the navigation bar, is as this tab left it.

What a link says is not to be trusted: names are looked up among the options, numbers held against their ends, and
anything else is as if it were not there.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, MutableMapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import streamlit as st

from dashboard.prose import verbatim

P = ParamSpec("P")
T = TypeVar("T")
Said = dict[str, list[str]]  # parameters and their values, of which most have one

_ENDS = re.compile(r"(-?[\d.]+(?:e[+-]?\d+)?)-(-?[\d.]+(?:e[+-]?\d+)?)")
_WRITTEN = "url_written"  # of every page: what it was last drawn with
_ALONG = "url_along"  # of every page: what is written if anything is
_BARE = "url_bare"  # of every page: what its address without parameters stands for
_PAGE = "url_page"
_TOLD = "url_told"
_MOVES = "url_moves"  # of every parameter: how often the address has moved


@dataclass
class _Inputs:
    """The inputs of the page that is being drawn: what they are on arrival, and what they turn out to be."""

    page: str
    said: Said
    written: Said
    now: dict[str, list[str]] = field(default_factory=dict)  # an empty list: left out
    along: Said = field(default_factory=dict)  # written if anything else is


_inputs: ContextVar[_Inputs] = ContextVar("inputs")


def in_url(draw: Callable[P, T]) -> Callable[P, T]:
    """A page whose inputs live in the URL."""
    return _drawn(draw, whole=True)


def part_in_url(draw: Callable[P, T]) -> Callable[P, T]:
    """A fragment of a page in the same file, whose inputs live in the URL with those of the page."""
    return _drawn(draw, whole=False)


def _drawn(draw: Callable[P, T], whole: bool) -> Callable[P, T]:
    @wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> T:
        if _inputs.get(None) is not None:
            return draw(*args, **kwargs)  # a fragment that is drawn with its page
        inputs = _arrive(draw.__module__)
        token = _inputs.set(inputs)
        try:
            made = draw(*args, **kwargs)
        finally:
            _inputs.reset(token)
        # A run that a person or `st.rerun` cut short writes nothing: the one that follows it has all the inputs.
        if not whole:
            inputs.along = _of_pages(_ALONG).get(inputs.page, {}) | inputs.along
        _write(inputs)
        return made

    return drawn


def go_to(**parameters: str) -> None:
    """Have the next drawing of the page hold these, whatever its widgets say: from the callback of a widget.

    An empty text is what holds without the parameter.
    """
    st.session_state[_TOLD] = {name: [text] if text else [] for name, text in parameters.items()}


def choose(
    label: str,
    options: Sequence[str],
    parameter: str,
    show: Callable[[str], str] = str,
    help: str | None = None,
    lasting: bool = True,
) -> str:
    """A select box whose choice is the query parameter `parameter`; a name that is not an option is said to be so.

    Without the parameter it is the first; `lasting` as for `keep`.
    """
    said, key = named(parameter), _key(parameter)
    if said is not None and said not in options and key not in st.session_state:
        st.info(f"There is no {label.lower()} {verbatim(repr(said[:80]))} here (any more); this is another.")
    wanted = said if said is not None and said in options else options[0]
    chosen: str = st.selectbox(label, options, options.index(wanted), show, key, help)
    keep(parameter, chosen, options[0], lasting)
    return chosen


def switch(label: str, parameter: str, help: str | None = None) -> bool:
    """A toggle that is on while the query parameter is `1`."""
    on = st.toggle(label, named(parameter) == "1", _key(parameter), help)
    keep(parameter, "1" if on else "")
    return on


def number(
    label: str, parameter: str, low: int, high: int, otherwise: int, step: int = 1, help: str | None = None
) -> int:
    """A whole number that is the query parameter `parameter`; `otherwise` when that is absent or no such number."""
    value = int(quantity(named(parameter), low, high, otherwise))
    chosen = int(st.number_input(label, low, high, value, step, key=_key(parameter), help=help))
    keep(parameter, str(chosen), str(otherwise))
    return chosen


def quantity(text: str | None, low: float, high: float, otherwise: float) -> float:
    """The number that a link gives; `otherwise` where it gives none from `low` to `high`."""
    try:
        value = float(text or "nan")
    except ValueError:
        return float(otherwise)
    return value if low <= value <= high else float(otherwise)


def named(parameter: str) -> str | None:
    """What the page came with for this parameter; None without it, when what is as usual holds."""
    values = _inputs.get().said.get(parameter)
    return values[-1] if values else None


def named_all(parameter: str) -> list[str]:
    """The values of a parameter that may be there more than once."""
    return _inputs.get().said.get(parameter, [])


def moved(parameter: str) -> bool:
    """Whether the address says something else than the page last wrote: then widgets are set to what it says."""
    inputs = _inputs.get()
    return inputs.said.get(parameter) != inputs.written.get(parameter)


def fresh_key(key: str, parameter: str) -> str:
    """The key of a widget of the parameter: of another one, which begins anew, when the address moves."""
    if moved(parameter):
        _renew(parameter)
    moves = _moves().get(parameter, 0)
    return f"{key}_{moves}" if moves else key


def forget(parameter: str) -> None:
    """Leave out what the parameter was, of the address and of its widget: it was about something else."""
    _inputs.get().said.pop(parameter, None)
    _renew(parameter)


def keep(parameter: str, text: str, otherwise: str = "", lasting: bool = True) -> None:
    """Have the query parameter say `text`; left out when that is what holds without it.

    What holds without it is not `lasting` where it may be another tomorrow: then it is left out of an address without
    any parameters, and only there.
    """
    if text == otherwise and not lasting:
        _inputs.get().along[parameter] = [text]
    else:
        _keep(parameter, [text], [otherwise])


def keep_all(parameter: str, texts: Sequence[str], otherwise: Sequence[str]) -> None:
    """`keep` of a parameter that may be there more than once."""
    _keep(parameter, list(texts), list(otherwise))


def choose_many(
    label: str,
    options: Sequence[str],
    parameter: str,
    otherwise: Sequence[str],
    show: Callable[[str], str] = str,
    help: str | None = None,
) -> list[str]:
    """A choice of any number of options, in the URL as a line of CSV; names of no option are passed over."""
    said = named(parameter)
    names = otherwise if said is None else _listed(said)
    wanted = list(dict.fromkeys(name for name in names if name in options))
    chosen: list[str] = st.multiselect(label, options, wanted, show, _key(parameter), help)
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
    chosen = float(
        st.number_input(label, float(low), float(high), value, float(step), show, key=_key(parameter), help=help)
    )
    keep(parameter, f"{chosen:.10g}", f"{otherwise:.10g}")
    return chosen


def pick(
    label: str, options: Sequence[str], parameter: str, show: Callable[[str], str] = str, help: str | None = None
) -> str:
    """One of a few options, side by side; the first without the parameter."""
    said = named(parameter)
    wanted = said if said is not None and said in options else options[0]
    chosen = st.segmented_control(
        label, options, default=wanted, format_func=show, help=help, key=_key(parameter), width="stretch"
    )
    keep(parameter, chosen or wanted, options[0])
    return chosen or wanted


def text(label: str, parameter: str, otherwise: str = "", **how: Any) -> str:
    """A line of text that is the query parameter; `how` is as `st.text_input` has it."""
    said = named(parameter)
    wanted = otherwise if said is None else said[: how.get("max_chars")]
    typed: str = st.text_input(label, wanted, key=_key(parameter), **how)
    keep(parameter, typed, otherwise)
    return typed


def interval(label: str, low: float, high: float, parameter: str, help: str | None = None) -> tuple[float, float]:
    """A range slider whose ends are the query parameter `parameter`, `LOW-HIGH`; absent when it is the whole range."""
    wanted = _ends(named(parameter) or "", low, high)
    step = round((high - low) / 200, 3) or 0.001
    key = fresh_key(f"url_{parameter}_{low:g}_{high:g}", parameter)
    chosen: tuple[float, float] = st.slider(label, low, high, wanted, step, key=key, help=help)
    keep(parameter, _range(low, high, chosen))
    return chosen


def set_interval(low: float, high: float, parameter: str, ends: tuple[float, float]) -> None:
    """Move the slider of `interval`, from the callback of another widget; `ends` outside the range are cut to it."""
    begin, end = max(low, min(ends)), min(high, max(ends))
    if begin < end:
        go_to(**{parameter: _range(low, high, (begin, end))})


def _arrive(page: str) -> _Inputs:
    """The inputs as the address has them, over which goes what a callback has told."""
    address = _address()
    written, bare = _of_pages(_WRITTEN), _of_pages(_BARE)
    if not address and st.session_state.get(_PAGE) != page:
        bare[page] = written.get(page, {})
    if not address and not (st.session_state.get(_PAGE) == page and written.get(page) == {}):
        address = bare.get(page, {})
    said = address | st.session_state.get(_TOLD, {})
    return _Inputs(page, {name: values for name, values in said.items() if values}, dict(written.get(page, {})))


def _write(inputs: _Inputs) -> None:
    said = {name: values for name, values in (inputs.said | inputs.now).items() if values}
    if said:
        said |= inputs.along
    if said != _address():
        st.query_params.from_dict(said)
    st.session_state.pop(_TOLD, None)
    st.session_state[_PAGE] = inputs.page
    _of_pages(_ALONG)[inputs.page] = inputs.along
    _of_pages(_WRITTEN)[inputs.page] = said
    if not said:
        _of_pages(_BARE)[inputs.page] = {}


def _address() -> Said:
    return {name: st.query_params.get_all(name) for name in st.query_params}


def _of_pages(key: str) -> MutableMapping[str, Said]:
    found: MutableMapping[str, Said] = st.session_state.setdefault(key, {})
    return found


def _keep(parameter: str, values: list[str], otherwise: list[str]) -> None:
    """A link may spell out what is as usual; it stays as it is."""
    inputs = _inputs.get()
    inputs.now[parameter] = [] if values == otherwise != inputs.said.get(parameter) else values


def _key(parameter: str) -> str:
    """The key of the parameter's only widget."""
    return fresh_key(f"url_{parameter}", parameter)


def _renew(parameter: str) -> None:
    _moves()[parameter] = _moves().get(parameter, 0) + 1
    _settle(parameter)


def _moves() -> MutableMapping[str, int]:
    found: MutableMapping[str, int] = st.session_state.setdefault(_MOVES, {})
    return found


def _settle(parameter: str) -> None:
    """The widget has what the address says, and is what holds from here on, even if this drawing is cut short."""
    inputs = _inputs.get()
    written = _of_pages(_WRITTEN).setdefault(inputs.page, {})
    for known in (written, inputs.written):
        if parameter in inputs.said:
            known[parameter] = inputs.said[parameter]
        else:
            known.pop(parameter, None)


def _range(low: float, high: float, chosen: tuple[float, float]) -> str:
    """`LOW-HIGH`; empty for the whole."""
    return "" if chosen == (low, high) else f"{chosen[0]:.10g}-{chosen[1]:.10g}"


def _ends(text: str, low: float, high: float) -> tuple[float, float]:
    said = _ENDS.fullmatch(text)
    try:
        begin, end = (low, high) if said is None else map(float, said.groups())
    except ValueError:  # 1.2.3
        return low, high
    return (max(low, begin), min(high, end)) if max(low, begin) <= min(high, end) else (low, high)
