"""Inputs live in the URL: share the link, get the same page; go back, and get the page as it was.

A page, drawn by a function that is `in_url`, writes all its parameters at once and only when it is complete: one change
by a person is one entry of the browser's history. What is as usual is left out. Where the address says something else
than was last written (a link, back, forward), the address holds; otherwise the widget.

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
_PATH = "url_path"
_NO_WIDGETS = (_WRITTEN, _ALONG, _BARE, _PAGE, _TOLD, _PATH)


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


def enter(path: str) -> None:
    """Forget the widgets of another path before its page is drawn.

    The same page at another path has them under the same keys, and Streamlit would show them empty.
    """
    if st.session_state.get(_PATH, path) != path:
        for key in [key for key in st.session_state if str(key).startswith("url_") and key not in _NO_WIDGETS]:
            del st.session_state[key]
    st.session_state[_PATH] = path


def go_to(**parameters: str) -> None:
    """Have the next drawing of the page hold these, whatever its widgets say: from the callback of a widget."""
    st.session_state[_TOLD] = {name: [text] for name, text in parameters.items()}


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
    said = named(parameter)
    if said is not None and said not in options and not _kept(parameter):
        st.info(f"There is no {label.lower()} {verbatim(repr(said[:80]))} here (any more); this is another.")
    wanted = said if said is not None and said in options else options[0]
    chosen: str = st.selectbox(
        label, options, format_func=show, help=help, key=_key(parameter, wanted, lambda held: held in options)
    )
    keep(parameter, chosen, options[0], lasting)
    return chosen


def switch(label: str, parameter: str, help: str | None = None) -> bool:
    """A toggle that is on while the query parameter is `1`."""
    on = st.toggle(label, help=help, key=_key(parameter, named(parameter) == "1"))
    keep(parameter, "1" if on else "")
    return on


def number(
    label: str, parameter: str, low: int, high: int, otherwise: int, step: int = 1, help: str | None = None
) -> int:
    """A whole number that is the query parameter `parameter`; `otherwise` when that is absent or no such number."""
    value = int(quantity(named(parameter), low, high, otherwise))
    chosen = int(st.number_input(label, low, high, step=step, help=help, key=_key(parameter, value)))
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
    """The key of a widget for something that is handed over: another, and so an empty one, when the address moves."""
    times = f"{key}_times"
    if moved(parameter):
        st.session_state[times] = st.session_state.get(times, 0) + 1
    count = st.session_state.get(times, 0)
    return f"{key}_{count}" if count else key


def forget(parameter: str) -> None:
    """Leave out what the parameter was, of the address and of its widget: it was about something else."""
    _inputs.get().said.pop(parameter, None)
    st.session_state.pop(f"url_{parameter}", None)


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
    label: str, options: Sequence[str], parameter: str, otherwise: Sequence[str], help: str | None = None
) -> list[str]:
    """A choice of any number of options, in the URL as a line of CSV; names of no option are passed over."""
    said = named(parameter)
    names = otherwise if said is None else _listed(said)
    wanted = list(dict.fromkeys(name for name in names if name in options))
    key = _key(parameter, wanted, lambda held: set(held) <= set(options))
    chosen: list[str] = st.multiselect(label, options, help=help, key=key)
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
        st.number_input(
            label,
            float(low),
            float(high),
            step=float(step),
            format=show,
            help=help,
            key=_key(parameter, value),
        )
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
        label, options, format_func=show, help=help, key=_key(parameter, wanted), width="stretch"
    )
    keep(parameter, chosen or wanted, options[0])
    return chosen or wanted


def text(label: str, parameter: str, otherwise: str = "", **how: Any) -> str:
    """A line of text that is the query parameter; `how` is as `st.text_input` has it."""
    said = named(parameter)
    wanted = otherwise if said is None else said[: how.get("max_chars")]
    typed: str = st.text_input(label, key=_key(parameter, wanted), **how)
    keep(parameter, typed, otherwise)
    return typed


def interval(label: str, low: float, high: float, parameter: str, help: str | None = None) -> tuple[float, float]:
    """A range slider whose ends are the query parameter `parameter`, `LOW-HIGH`; absent when it is the whole range."""
    key = _interval_key(low, high, parameter)
    _set(key, parameter, _ends(named(parameter) or "", low, high))
    step = round((high - low) / 200, 3) or 0.001
    chosen: tuple[float, float] = st.slider(label, low, high, step=step, help=help, key=key)
    keep(parameter, "" if chosen == (low, high) else f"{chosen[0]:.10g}-{chosen[1]:.10g}")
    return chosen


def set_interval(low: float, high: float, parameter: str, ends: tuple[float, float]) -> None:
    """Move the slider of `interval`, from the callback of another widget; `ends` outside the range are cut to it."""
    begin, end = max(low, min(ends)), min(high, max(ends))
    if begin < end:
        st.session_state[_interval_key(low, high, parameter)] = (begin, end)


def _arrive(page: str) -> _Inputs:
    """The inputs as the address has them, over which goes what a callback has told."""
    address = _address()
    written, bare = _of_pages(_WRITTEN), _of_pages(_BARE)
    if not address and st.session_state.get(_PAGE) != page:
        bare[page] = written.get(page, {})
    if not address and not (st.session_state.get(_PAGE) == page and written.get(page) == {}):
        address = bare.get(page, {})
    return _Inputs(page, address | st.session_state.get(_TOLD, {}), dict(written.get(page, {})))


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


def _key(parameter: str, wanted: Any, possible: Callable[[Any], bool] = lambda held: True) -> str:
    """The key of a parameter's widget, which holds `wanted` when it is new, or the address has moved."""
    return _set(f"url_{parameter}", parameter, wanted, possible)


def _set(key: str, parameter: str, wanted: Any, possible: Callable[[Any], bool] = lambda held: True) -> str:
    if moved(parameter) or key not in st.session_state or not possible(st.session_state[key]):
        st.session_state[key] = wanted
        _settle(parameter)
    return key


def _kept(parameter: str) -> bool:
    """Whether the widget is there and stays as it is."""
    return f"url_{parameter}" in st.session_state and not moved(parameter)


def _settle(parameter: str) -> None:
    """The widget has what the address says, and is what holds from here on, even if this drawing is cut short."""
    inputs = _inputs.get()
    written = _of_pages(_WRITTEN).setdefault(inputs.page, {})
    for known in (written, inputs.written):
        if parameter in inputs.said:
            known[parameter] = inputs.said[parameter]
        else:
            known.pop(parameter, None)


def _interval_key(low: float, high: float, parameter: str) -> str:
    return f"url_{parameter}_{low:g}_{high:g}"


def _ends(text: str, low: float, high: float) -> tuple[float, float]:
    said = _ENDS.fullmatch(text)
    try:
        begin, end = (low, high) if said is None else map(float, said.groups())
    except ValueError:  # 1.2.3
        return low, high
    return (max(low, begin), min(high, end)) if max(low, begin) <= min(high, end) else (low, high)
