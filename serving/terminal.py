"""A terminal to print on: names come from traces and recordings, and can neither steer it nor be taken for markup."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table as Grid
from rich.text import Text

from serving.errors import without_controls
from serving.report import BAND, Column, Line, Report, Table

_STYLES = {"text": "", "headline": "bold", "title": "italic", "note": "dim", "warning": "yellow", "command": "cyan"}
_MARKED = "yellow"
_LEAST_TEXT = 14  # characters of a line of a text that goes on in the next
_SHORT = 12  # characters of a text that stays on a line


class Terminal(Console):
    """A terminal of plain text: control characters in its output are escaped."""

    def __init__(self, **how: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **how)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=without_controls(segment.text))


def print_report(report: Report, console: Console | None = None) -> None:
    """Print a report on stdout. A line stays a line however long it is, so that scripts can look for it."""
    console = console or Terminal()
    for shown in on_terminal(report, console.width):
        console.print(shown, soft_wrap=isinstance(shown, Text))


def on_terminal(report: Report, width: int) -> Iterator[RenderableType]:
    """Yield a report as rich draws it, with an empty line before a title and after a table."""
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
    """Return a table of which no figure is cut: columns that are spare are left out where there is no room."""
    texts = table.texts()
    longest = [_longest(column, [row[at] for row in texts]) for at, column in enumerate(table.columns)]
    least = [
        length if column.right or column.spare else min(length, _LEAST_TEXT)
        for column, length in zip(table.columns, longest, strict=True)
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
    for row, cells in enumerate(texts):
        grid.add_row(*(Text(cells[at], _MARKED if (row, at) in table.marked else "") for at in kept))
    return grid


def _longest(column: Column, cells: Sequence[str]) -> int:
    return max(map(len, (*column.name.split("\n"), *cells)))
