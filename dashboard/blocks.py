"""The building blocks of pages: titles, figures, tables, and messages about a wrong file or input.

A page has one badge with the trust in its numbers. The heading of each figure gives the reason on hover.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Literal

import plotly.graph_objects as go
import pyarrow as pa
import pyarrow.compute as pc
import streamlit as st

from tokentwin.calibration.trust import ASSUMED, EXTRAPOLATED, INTERPOLATED, MEASURED, UNKNOWN, VALIDATED, Trust
from tokentwin.dashboard.in_words import in_words
from tokentwin.dashboard.sheet import Fact
from tokentwin.dashboard.shown import literal, sentence, verbatim
from tokentwin.dashboard.url import go_to
from tokentwin.serving.answers.figures import NOTHING
from tokentwin.serving.answers.report import Table
from tokentwin.serving.errors import UserError
from tokentwin.serving.metrics import defined_in

# What screen readers read, and nobody sees.
_UNSEEN = "position:absolute;width:1px;height:1px;margin:0;overflow:hidden;clip-path:inset(50%);white-space:nowrap"
_BARE = {"displayModeBar": False}  # Plotly's toolbar would cover legends

_LONGEST = 60  # letters of a text that a column shows in full
_LETTER_PX, _MARGIN_PX = 7, 20  # about the width of a letter in a table, and of a cell's margins

_SHOWN = {
    MEASURED: ("green", "speed"),
    VALIDATED: ("green", "verified"),
    INTERPOLATED: ("blue", "linear_scale"),
    EXTRAPOLATED: ("orange", "explore"),
    UNKNOWN: ("gray", "help"),
    ASSUMED: ("gray", "edit"),
}
_DETAIL = re.compile(r" \(least certain: ([^)]*)\)")  # of a reason, for those who know the kernels
_MEANING = {
    MEASURED: "The figure was recorded on the real engine, without any prediction.",
    VALIDATED: "These kernels or steps were measured, or the result was compared with a real run.",
    INTERPOLATED: "These kernels or steps lie between measured ones.",
    EXTRAPOLATED: "These kernels or steps lie outside the measured ones. Predicted times follow from the nearest ones.",
    UNKNOWN: "Nothing is known about how far to trust this figure.",
    ASSUMED: "This figure is an input, neither measured nor predicted.",
}


def titled(text: str, widths: Sequence[float] = (2, 1)) -> Any:
    """Draw the title of a page, and return the place beside it, where the page's subject is chosen."""
    title, beside = st.columns(widths, vertical_alignment="bottom")
    title.title(text, anchor=False)
    return beside


def level_badge(level: str) -> str:
    """Return a level's badge as Markdown that fits into a line; an unknown name is shown as the level `unknown`."""
    level = level.lower() if level.lower() in _SHOWN else UNKNOWN
    colour, icon = _SHOWN[level]
    return f":{colour}-badge[:material/{icon}: {level}]"


def badge(trust: Trust, place: Any = st) -> None:
    """Draw the badge of a page with its reason; on hover it says what the level means, and names the kernel."""
    level, reason = trust
    detail = _DETAIL.search(reason)
    label = f"{level_badge(level)} :gray[:small[{verbatim(plain(reason))}]]"
    meaning = _MEANING.get(level, _MEANING[UNKNOWN])
    meaning += f" Least certain: {verbatim(detail[1])}." if detail else ""
    place.markdown(label, help=meaning, width="content")


def plain(reason: str) -> str:
    """Return a reason without the name of the least certain kernel."""
    return _DETAIL.sub("", reason)


def heading(
    text: str,
    trust: Trust | None,
    help: str | None = None,
    place: Any = st,
    small: bool = False,
    marked: bool = False,
) -> None:
    """Draw a heading that shows on hover the trust in the figures below it.

    A `small` heading is bold text, for a card. A `marked` heading has the badge of the page beside it.
    """
    trusted = f"{level_badge(trust.level)} {sentence(verbatim(trust.reason))}" if trust else None
    help = "\n\n".join(filter(None, (help or defined_in(text), trusted))) or None
    if small:
        place.markdown(f"**{text}**", help=help, width="content")
    else:
        place.header(text, anchor=False, help=help, width="content")
    if trust is not None and marked:
        badge(trust, place)


def figure(
    plot: go.Figure,
    key: str,
    text: str,
    trust: Trust | None,
    help: str | None = None,
    place: Any = None,
    small: bool = False,
    marked: bool = False,
    **events: Any,
) -> Any:
    """Draw a plot under its heading, as one block, and return the selection in it, as Streamlit reports it.

    The heading goes to `place` if it is given, such as a column beside the inputs of the figure. The caller then keeps
    both in one container. `menu` is Plotly's configuration, `events` are arguments of `st.plotly_chart`. A `marked`
    figure has the badge of the page. Beside the plot stands a text for readers who cannot see it.
    """
    with st.container():
        heading(text, trust, help, place or st, small, marked)
        with st.container(gap=None):
            st.html(f'<p style="{_UNSEEN}">{escape(in_words(plot))}</p>')
            return st.plotly_chart(plot, key=key, config=_BARE, **events)


def table(table: Table, **how: Any) -> None:
    """Draw a table of a report, whose numbers can be sorted. `how` are arguments of `st.dataframe`."""
    texts = table.texts(page=True)
    if table.sentences:  # a data frame would cut them off
        st.table([dict(zip(table.titles, row, strict=True)) for row in texts], hide_index=True)
        return
    cells, formats = {}, {}
    for at, (title, column) in enumerate(zip(table.titles, table.columns, strict=True)):
        cells[title] = [column.number(row[at]) for row in table.rows] if column.printf else [row[at] for row in texts]
        if column.right:
            formats[title] = column.printf or "right"
    helps = dict(zip(table.titles, (column.help or defined_in(column.name) for column in table.columns), strict=True))
    data_table(cells, formats, helps, **{"height": "content"} | how)


def data_table(
    rows: Any,
    formats: Mapping[str, str] | None = None,
    help: Mapping[str, str | None] | None = None,
    columns: Mapping[str, Any] | None = None,
    **how: Any,
) -> None:
    """Draw rows or columns: `formats` are printf formats of numbers, or `right` for text; `help` is shown on hover.

    `columns` is a `column_config`, `how` are arguments of `st.dataframe`. Other rows become an Arrow table first:
    Streamlit would make a frame of them, and pandas imports slowly.
    """
    said = help or {}
    numbers = {
        name: st.column_config.TextColumn(alignment="right", help=said.get(name))
        if form == "right"
        else st.column_config.NumberColumn(format=form, help=said.get(name))
        for name, form in (formats or {}).items()
    }
    if not isinstance(rows, pa.Table):
        if not isinstance(rows, Mapping):
            rows = {
                name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)
            }
        rows = pa.table({name: pa.array(values, from_pandas=True) for name, values in rows.items()})
    wide = {  # Streamlit makes a column as wide as its title and its first texts, and cuts longer ones
        field.name: st.column_config.TextColumn(width=_LETTER_PX * longest + _MARGIN_PX, help=said.get(field.name))
        for field in rows.schema
        if pa.types.is_string(field.type)
        and max(len(field.name), _longest(rows[field.name].slice(0, 1))) < (longest := _longest(rows[field.name]))
        if longest <= _LONGEST
    }
    config = {**wide, **numbers, **(columns or {})}
    st.dataframe(rows, hide_index=True, column_config=config, **{"placeholder": NOTHING} | how)


def _longest(texts: pa.ChunkedArray) -> int:
    """Return the number of letters of the longest text; 0 without one."""
    return pc.max(pc.utf8_length(texts)).as_py() or 0


def text(content: str, soft: bool = False) -> None:
    if content:
        (st.caption if soft else st.markdown)(_escaped(content))


def warning(content: str) -> None:
    st.warning(_escaped(content), icon=":material/warning:")


def facts(figures: Iterable[Fact], width: int | Literal["content"] = "content") -> None:
    """Draw headline figures side by side, with their bands in grey; a figure is `width` pixels wide."""
    with st.container(horizontal=True, gap="medium" if width == "content" else "small"):
        for name, value, band, help in figures:
            name, value, ends = (part.replace("$", "\\$") for part in (name, value, band or ""))
            st.metric(name, value, ends or None, "off", help=help or defined_in(name), width=width, delta_arrow="off")


def code(text: str) -> None:
    st.code(text, language=None, wrap_lines=True)  # coloured code is too faint


def settings(values: Any) -> None:
    st.json(values, expanded=1)


def beside(count: int) -> Sequence[Any]:
    return st.columns(count, gap="medium")


def fold(title: str) -> Any:
    return st.expander(title)


def choosing(parameter: str, ids: Sequence[Any], key: str) -> dict[str, Any]:
    """Return arguments that make a table's rows selectable; `parameter` in the URL becomes the selected row's id."""

    def selected() -> None:
        rows = st.session_state[key].selection.rows
        if rows:
            go_to(**{parameter: str(ids[rows[0]])})

    return {"key": key, "on_select": selected, "selection_mode": "single-row"}


def mistake(error: UserError | str, runs: Path | None = None) -> None:
    """Show the error of a file or an input in one line without Markdown, with paths relative to `runs`.

    The page does not show where the directory of runs is on the server.
    """

    def relative(text: object) -> object:
        return text.replace(f"{runs}/", "") if runs and isinstance(text, str) else text

    if isinstance(error, UserError):
        error = str(UserError(str(relative(error.field)), relative(error.value), error.remedy))
    st.error(verbatim(error), icon=":material/error:")


def _escaped(text: str) -> str:
    """Escape text as a `Sheet` reads it: only bold and backquotes stay Markdown."""
    return re.sub(r"\\([*`])", r"\1", literal(text))
