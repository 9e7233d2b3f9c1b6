"""Printing on a terminal.

Names from traces and recordings are escaped, so that they can neither steer the terminal nor act as markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table as Grid
from rich.text import Text

from tokentwin.serving.answers.report import BAND, Column, Line, Report, Table
from tokentwin.serving.errors import without_controls

_STYLES = {"text": "", "headline": "bold", "title": "italic", "note": "dim", "warning": "yellow", "command": "cyan"}
_MARKED = "yellow"
_LEAST_TEXT = 14  # minimum width of a column whose text may wrap, in characters
_SHORT = 12  # a text of at most this many characters does not wrap


class Terminal(Console):
    """A terminal of plain text: control characters in its output are escaped."""

    def __init__(self, **how: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **how)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=without_controls(segment.text))


def print_report(report: Report, console: Console | None = None) -> None:
    """Print a report on stdout. A line is never wrapped, however long it is, so that scripts can look for it."""
    console = console or Terminal()
    for shown in on_terminal(report, console.width):
        console.print(shown, soft_wrap=isinstance(shown, Text))


def on_terminal(report: Report, width: int) -> Iterator[RenderableType]:
    """Yield the parts of a report as rich renderables, with an empty line before a title and after a table."""
    before: Line | Table | None = None
    for part in report:
        title = part.title if isinstance(part, Table) else part.tone == "title"
        if before is not None and (title or isinstance(before, Table)):
            yield Text()
        if isinstance(part, Line):
            yield Text(part.text, style=_STYLES[part.tone])
        else:
            if part.title:
                yield Text(part.title, style=_STYLES["title"])
            yield _grid(part, width)
        before = part


def _grid(table: Table, width: int) -> Grid:
    """Return a table in which no figure is cut; spare columns are left out if there is no room for them."""
    texts = table.texts()
    cells = [[column.name, *(row[at] for row in texts)] for at, column in enumerate(table.columns)]
    longest = [max(len(line) for cell in column for line in cell.split("\n")) for column in cells]
    least = [
        min(size, _least(column, texts)) for column, size, texts in zip(table.columns, longest, cells, strict=True)
    ]
    kept = list(range(len(table.columns)))
    for spare in sorted({column.spare for column in table.columns} - {0}, reverse=True):
        if sum(least[at] + 2 for at in kept) - 2 > width:
            kept = [at for at in kept if table.columns[at].spare != spare]
    apart = table.sentences and sum(longest[at] + 2 for at in kept) - 2 > width
    grid = Grid(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False, show_lines=apart)
    for at in kept:
        column = table.columns[at]
        whole = (column.right and column.form is not BAND) or longest[at] <= _SHORT
        justify = "right" if column.right else "left"
        grid.add_column(column.name, justify=justify, no_wrap=whole, overflow="fold")  # type: ignore[arg-type]
    for at_row, row in enumerate(texts):
        grid.add_row(*(Text(row[at], _MARKED if (at_row, at) in table.marked else "") for at in kept))
    return grid


def _least(column: Column, cells: Iterable[str]) -> float:
    """Return the minimum width of a column: text may wrap after a word, a name after any letter."""
    if column.right or column.spare:
        return inf
    words = (word for cell in cells for word in cell.split())
    return max(_LEAST_TEXT, *map(len, words)) if column.form is None else _LEAST_TEXT
