"""Inputs of a page in its URL, so that a shared link shows the same page, and back and forward restore it.

A function decorated with `in_url` draws a page. All parameters are written to the address at once, when the page is
complete, so one change by a user is one entry of the browser's history. A default is left out.

The tab's session holds the inputs. The address is read only when it was changed from outside: at the first drawing,
after a link, back or forward. With each click the browser sends the address that it has. While a user clicks quickly,
this is one that the page wrote some clicks ago, and it would undo the clicks since. The page knows what it wrote, and
ignores it.

Every drawing gives a widget its first value, and the widget gets a new key (`fresh_key`) when the address changes. A
widget must never be set through `st.session_state`, because Streamlit sends that value to the browser only once. If a
user interrupts this drawing, the browser starts the widget at its lowest value, and reports that as the user's choice.

The navigation bar opens a page without parameters. The page then has the inputs with which this tab last showed it.

A link is not trusted. A name must be among the options and a number between its ends; anything else is ignored.

Streamlit's own `bind="query-params"` was tried on 22 November 2026 (1.67.0, Chromium) and serves none of these widgets:
it replaces the history entry, so back does not undo a change. It also carried a value to the next page that has a
parameter of that name, wrote one entry for each widget that a callback set, and failed on `?rows=1e400`.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import streamlit as st
from streamlit.runtime.scriptrunner import get_script_run_ctx

from tokentwin.dashboard.shown import verbatim
from tokentwin.serving.errors import UserError

P = ParamSpec("P")
T = TypeVar("T")
Said = dict[str, list[str]]  # parameters and their values; most parameters have one value

_NUMBER = r"(-?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)"
_ENDS = re.compile(f"{_NUMBER}-{_NUMBER}")
_PAGES = "url_pages"  # keys of `st.session_state`
_LAST_PAGE = "url_page"
_STATED = "url_stated"


@dataclass
class _Page:
    """The inputs of one page, as this tab knows them; `said` and `now` belong to the current drawing."""

    said: Said = field(default_factory=dict)  # parameters of the page before this drawing, or those to which it goes
    now: Said = field(default_factory=dict)  # values of its widgets; an empty list: left out
    along: Said = field(default_factory=dict)  # parameters that are written only together with others
    written: Said = field(default_factory=dict)  # parameters whose values the widgets had last
    sent: list[Said] = field(default_factory=list)  # addresses that the browser may have, the oldest first
    new: bool = False  # whether the address was changed from outside, and nobody asked for it yet
    bare: Said = field(default_factory=dict)  # parameters that the address without parameters stands for
    moves: dict[str, int] = field(default_factory=dict)  # number of changes of the address, by parameter
    refused: list[UserError] = field(default_factory=list)  # numbers out of range in this drawing


_drawing: ContextVar[_Page] = ContextVar("drawing")


def in_url(draw: Callable[P, T]) -> Callable[P, T]:
    """Decorate a page whose inputs live in the URL."""
    return _drawn(draw, whole=True)


def part_in_url(draw: Callable[P, T]) -> Callable[P, T]:
    """Decorate a fragment of a page in the same file, whose inputs live in the URL with the page's own."""
    return _drawn(draw, whole=False)


def _drawn(draw: Callable[P, T], whole: bool) -> Callable[P, T]:
    @wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> T:
        if _drawing.get(None) is not None:
            return draw(*args, **kwargs)  # a fragment that is drawn with its page
        page = _arrive(draw.__module__)
        if whole:
            page.along = {}
        token = _drawing.set(page)
        try:
            made = draw(*args, **kwargs)
        finally:
            _drawing.reset(token)
        # A drawing that a user or `st.rerun` interrupts writes nothing, because the next drawing has all the inputs.
        _write(page)
        return made

    return drawn


def go_to(**parameters: str | Sequence[str]) -> None:
    """Set parameters for the next drawing of the page, in place of its widgets' values; call it in a widget's callback.

    A parameter may have several values. An empty text resets a parameter to its default.
    """
    st.session_state[_STATED] = st.session_state.get(_STATED, {}) | {
        name: list(filter(None, [value] if isinstance(value, str) else value)) for name, value in parameters.items()
    }


def going_to(parameter: str) -> list[str] | None:
    """Return the values that an earlier callback of this click has set with `go_to`; None without one."""
    values: list[str] | None = st.session_state.get(_STATED, {}).get(parameter)
    return values


def choose(
    label: str,
    options: Sequence[str],
    parameter: str,
    show: Callable[[str], str] = str,
    help: str | None = None,
    lasting: bool = True,
    growing: bool = False,
) -> str:
    """Draw a select box bound to the query parameter `parameter`, and return the choice, by default the first option.

    A message says if the link names no option. `lasting` is passed to `keep`. If there will be more options, they are
    `growing`: a choice that nobody made then stays the first option.
    """
    said, key = named(parameter), _key(parameter) + (f"_from_{options[0]}" if growing else "")
    if said is not None and said not in options and key not in st.session_state:
        st.info(
            f"{label}: {verbatim(repr(said[:80]))} of the link is not available here. The page shows another choice."
        )
    wanted = said if said is not None and said in options else options[0]
    chosen: str = st.selectbox(label, options, options.index(wanted), show, key, help)
    keep(parameter, chosen, options[0], lasting)
    return chosen


def usual_first(usual: str, names: Iterable[str]) -> list[str]:
    """Return the options of a choice with `usual` first, which is the default."""
    return [usual, *(name for name in names if name != usual)]


def switch(label: str, parameter: str, help: str | None = None) -> bool:
    """Draw a toggle that is on while the query parameter is `1`."""
    chosen = st.toggle(label, named(parameter) == "1", _key(parameter), help)
    keep(parameter, "1" if chosen else "")
    return chosen


def number(
    label: str, parameter: str, low: int, high: int, otherwise: int, step: int = 1, help: str | None = None
) -> int:
    """Draw `amount` for a whole number, and return it."""
    return int(amount(label, parameter, low, high, otherwise, step, help, "%d", int))


def _refused(label: str, said: str, remedy: str) -> None:
    """Show that the page does not accept the value in the link."""
    st.caption(
        f":material/link_off: {label.strip()} cannot be {verbatim(repr(said[:80]))}, as the link says: {remedy}."
    )


def quantity(text: str | None, low: float, high: float, otherwise: float) -> float:
    """Return the number that a link gives; `otherwise` if it is not a number from `low` to `high`."""
    try:
        value = float(text or "nan")
    except ValueError:
        return float(otherwise)
    return value if low <= value <= high else float(otherwise)


def named(parameter: str) -> str | None:
    """Return the value of this parameter with which the page was opened; None if the page has its default."""
    values = named_all(parameter)
    return values[-1] if values else None


def named_all(parameter: str) -> list[str]:
    """Return the values of a parameter that may be there more than once."""
    return _drawing.get().said.get(parameter, [])


def moved(parameter: str) -> bool:
    """Return True if the page goes to another value than its widget had; the widget then starts with that value."""
    return named_all(parameter) != _drawing.get().written.get(parameter, [])


def fresh_key(key: str, parameter: str) -> str:
    """Return the key of the parameter's widget; when the address changes, the key changes and the widget is reset."""
    if moved(parameter):
        _renew(parameter)
    moves = _drawing.get().moves.get(parameter, 0)
    return f"{key}_{moves}" if moves else key


def forget(parameter: str) -> None:
    """Remove a parameter from the address, and reset its widget, because it was about another subject."""
    _drawing.get().said.pop(parameter, None)
    _renew(parameter)


def opened_with(parameter: str) -> str | None:
    """Return the value that a new address has for this parameter; None if the address is as the page wrote it."""
    page = _drawing.get()
    value, page.new = named(parameter) if page.new else None, False
    return value


def open_kept(inputs: Said, also: Collection[str]) -> None:
    """Take `inputs` in place of those of the address; parameters in `also` stay."""
    page = _drawing.get()
    page.said = inputs | {name: values for name, values in page.said.items() if name in also}


def keep(parameter: str, text: str, otherwise: str = "", lasting: bool = True) -> None:
    """Write `text` to the query parameter, or leave it out if it is the default `otherwise`.

    A default that may change is not `lasting`. It is left out only if the address has no other parameters.
    """
    if text == otherwise and not lasting:
        _drawing.get().along[parameter] = [text]
    else:
        keep_all(parameter, [text], [otherwise])


def keep_all(parameter: str, texts: Sequence[str], otherwise: Sequence[str]) -> None:
    """Do as `keep` for a parameter with several values. A default that the link spells out stays in it."""
    page = _drawing.get()
    page.now[parameter] = [] if list(texts) == list(otherwise) != page.said.get(parameter) else list(texts)


def choose_many(
    label: str,
    options: Sequence[str],
    parameter: str,
    otherwise: Sequence[str],
    show: Callable[[str], str] = str,
    help: str | None = None,
    more: bool = False,
    growing: bool = False,
) -> list[str]:
    """Draw a choice of any number of options, in the URL as a line of CSV, and return the chosen names.

    Names that are no options are ignored, unless `more` may be typed; the caller must then check them. If there will be
    more options, they are `growing`: a default then grows with them.
    """
    said = named(parameter)
    names = otherwise if said is None else _listed(said)
    wanted = list(dict.fromkeys(name for name in names if more or name in options))
    key = _key(parameter) + (f"_of_{len(options)}" if growing else "")
    unknown = [name for name in names if name not in wanted]
    if unknown and key not in st.session_state:
        _refused(label, _line(unknown), "it is left out")
    known = dict.fromkeys([*options, *wanted])
    chosen: list[str] = st.multiselect(label, known, wanted, show, key, help, accept_new_options=more, select_all=False)
    keep(parameter, _line(chosen), _line(otherwise))
    return chosen


def _line(names: Sequence[str]) -> str:
    """Return `H100,H200`; a name with a comma in it is quoted."""
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
    kind: type[float] = float,
) -> float:
    """Draw a number input bound to the query parameter, and return its value, by default `otherwise`."""
    said, key = named(parameter), _key(parameter)
    value = kind(quantity(said, low, high, otherwise))
    if said is not None and quantity(said, low, high, math.inf) == math.inf and key not in st.session_state:
        _refused(label, said, f"it must be from {low:,.6g} to {high:,.6g}, and is {otherwise:,.6g} here")
    chosen = typed_number(label, low, high, value, step, key, show, help, kind)
    keep(parameter, f"{chosen:.10g}", f"{otherwise:.10g}")
    return chosen


def typed_number(
    label: str,
    low: float,
    high: float,
    value: float,
    step: float,
    key: str,
    show: str | None = None,
    help: str | None = None,
    kind: type[float] = float,
) -> float:
    """Draw a number input and return its value, or `value` if it is not from `low` to `high`.

    Streamlit would not send such a number, so a button would start the work with the number before it. Here the number
    comes, and `check_numbers` refuses it.
    """
    typed = st.number_input(label, None, None, value, kind(step), show, key=key, help=help)
    if typed is not None and low <= typed <= high:
        return kind(typed)
    said = "nothing" if typed is None else f"{typed:,.10g}"
    _drawing.get().refused.append(UserError(label.strip(), said, f"must be from {low:,.6g} to {high:,.6g}"))
    return value


def check_numbers() -> None:
    """Raise UserError for the first number of this drawing that is out of its range."""
    for error in _drawing.get().refused:
        raise error


def pick(
    label: str, options: Sequence[str], parameter: str, show: Callable[[str], str] = str, help: str | None = None
) -> str:
    """Draw a few options side by side, and return the chosen one; the default is the first."""
    said = named(parameter)
    wanted = said if said is not None and said in options else options[0]
    chosen = st.segmented_control(
        label, options, default=wanted, format_func=show, help=help, key=_key(parameter), width="stretch"
    )
    keep(parameter, chosen or wanted, options[0])
    return chosen or wanted


def text(label: str, parameter: str, otherwise: str = "", **how: Any) -> str:
    """Draw a line of text bound to the query parameter, and return it; `how` are arguments of `st.text_input`."""
    said = named(parameter)
    wanted = otherwise if said is None else said[: how.get("max_chars")]
    typed: str = st.text_input(label, wanted, key=_key(parameter), **how)
    keep(parameter, typed, otherwise)
    return typed


def interval(label: str, low: float, high: float, parameter: str, help: str | None = None) -> tuple[float, float]:
    """Draw a range slider bound to the query parameter, `LOW-HIGH`; absent if it is the whole range.

    Return its ends.
    """
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


def link() -> Said:
    """Return the parameters that the page's address will have, as far as they are drawn by now."""
    page = _drawing.get()
    return {parameter: values for parameter, values in (page.said | page.now).items() if values}


def _arrive(name: str) -> _Page:
    """Return the page of this name, with inputs from its last drawing, a new address, or a callback that set them."""
    pages: dict[str, _Page] = st.session_state.setdefault(_PAGES, {})
    page = pages.setdefault(name, _Page())
    address, opened = _address(), st.session_state.get(_LAST_PAGE) != name
    st.session_state[_LAST_PAGE] = name
    context = get_script_run_ctx()
    if opened or address not in page.sent or (context and context.is_history_navigation):
        if opened and not address:
            page.bare = page.said
        page.said, page.sent, page.new = address or page.bare, [address], True
    else:
        del page.sent[: page.sent.index(address)]
    said = page.said | st.session_state.pop(_STATED, {})
    page.said = {parameter: values for parameter, values in said.items() if values}
    page.now, page.refused = {}, []
    return page


def _write(page: _Page) -> None:
    said = {parameter: values for parameter, values in (page.said | page.now).items() if values}
    if said:
        said = page.along | said | page.along
    else:
        page.bare = {}
    if said != page.sent[-1]:
        page.sent.append(said)
    if len(page.sent) > 1:
        st.query_params.from_dict(said)
    page.said, page.written = said, dict(said)


def _address() -> Said:
    return {name: st.query_params.get_all(name) for name in st.query_params}


def _key(parameter: str) -> str:
    return fresh_key(f"url_{parameter}", parameter)


def _renew(parameter: str) -> None:
    """Reset the widget to the value in the address, but only once, even if this drawing is interrupted."""
    page = _drawing.get()
    page.moves[parameter] = page.moves.get(parameter, 0) + 1
    page.written[parameter] = named_all(parameter)


def _range(low: float, high: float, chosen: tuple[float, float]) -> str:
    """Return `LOW-HIGH`; empty for the whole range."""
    return "" if chosen == (low, high) else f"{chosen[0]:.10g}-{chosen[1]:.10g}"


def _ends(text: str, low: float, high: float) -> tuple[float, float]:
    said = _ENDS.fullmatch(text)
    begin, end = map(float, said.groups()) if said else (low, high)
    begin, end = max(low, begin), min(high, end)
    return (begin, end) if begin <= end else (low, high)
