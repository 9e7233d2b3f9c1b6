"""Printing on a terminal.

Names from traces and recordings are escaped, so that they can neither steer the terminal nor act as markup.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from tokentwin.serving.answers.report import BAND, Column, Line, Report, Table
from tokentwin.serving.errors import without_controls
from tokentwin.serving.metrics import METRICS

_STYLES = {"text": "", "headline": "bold", "title": "italic", "note": "dim", "warning": "yellow", "command": "cyan"}
_MARKED = "yellow"
_LEAST_TEXT = 14  # minimum width of a column whose text may wrap, in characters
_SHORT = 12  # a text of at most this many characters does not wrap
_APART = 2  # spaces between columns
_PARTS = re.compile(r"[^_]+_?")
_UNLIMITED = 1_000_000  # characters


class Terminal(Console):
    """A terminal of plain text: control characters in its output are escaped."""

    def __init__(self, **how: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **how)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=without_controls(segment.text))


def print_report(report: Report, console: Console | None = None) -> None:
    """Print a report on stdout. A line is never wrapped, however long it is, so that scripts can look for it.

    Tables are as wide as their figures need. If the output is no terminal, and the environment variable COLUMNS sets no
    width, no text in a table wraps either, except whole sentences.
    """
    console = console or Terminal()
    piped = not (console.is_terminal or console.record or "COLUMNS" in os.environ)
    for shown in on_terminal(report, console.width, piped):
        console.print(shown, soft_wrap=True)


def on_terminal(report: Report, width: int, piped: bool = False) -> Iterator[Text]:
    """Yield the parts of a report as texts of rich, with an empty line before a title and after a table."""
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
            yield _grid(part, _UNLIMITED if piped and not part.sentences else width)
        before = part


class _Column(NamedTuple):
    """A column of texts, with its name first; `least` is the width in which no figure and no word is cut."""

    column: Column
    texts: list[str]
    widest: int
    least: int

    @classmethod
    def of(cls, column: Column, cells: Sequence[str]) -> _Column:
        texts = [without_controls(text) for text in (column.name, *cells)]
        widest = max(cell_len(line) for text in texts for line in text.split("\n"))
        whole = column.right and column.form is not BAND
        uncut = [text.split("\n") if whole and at else _unbroken(text) for at, text in enumerate(texts)]
        least = max((cell_len(part) for parts in uncut for part in parts), default=0)
        roomy = 0 if whole else _SHORT if widest <= _SHORT else _LEAST_TEXT
        return cls(column, texts, widest, min(widest, max(least, roomy)))

    def lines(self, row: int, width: int) -> list[str]:
        """Return the lines of a cell, padded to `width`; row 0 has the name."""
        wrapped = [line for text in self.texts[row].split("\n") for line in _wrapped(text, width)]
        spaces = [" " * (width - cell_len(line)) for line in wrapped]
        return [
            space + line if self.column.right else line + space for line, space in zip(wrapped, spaces, strict=True)
        ]


def _grid(table: Table, width: int) -> Text:
    """Return a table as text.

    If there is no room for it, spare columns are left out, then columns are only one space apart, and then the table is
    wider than `width`.
    """
    cells = table.texts()
    columns = [_Column.of(column, [row[at] for row in cells]) for at, column in enumerate(table.columns)]
    kept = list(range(len(columns)))
    for spare in sorted({column.spare for column in table.columns} - {0}, reverse=True):
        if sum(columns[at].least + _APART for at in kept) - _APART > width:
            kept = [at for at in kept if table.columns[at].spare != spare]
    least = sum(columns[at].least for at in kept)
    gap = " " * (_APART if least + _APART * (len(kept) - 1) <= width else 1)
    widths = _shared([columns[at] for at in kept], width - len(gap) * (len(kept) - 1))
    apart = table.sentences and any(columns[at].widest > wide for at, wide in zip(kept, widths, strict=True))
    rule = "─" * (sum(widths) + len(gap) * (len(widths) - 1))
    grid = Text()
    for row in range(len(cells) + 1):
        grid.append("" if row == 0 else f"{rule}\n" if row == 1 else "\n" * apart)
        for line in zip_longest(*(columns[at].lines(row, wide) for at, wide in zip(kept, widths, strict=True))):
            for at, wide, text in zip(kept, widths, line, strict=True):
                style = "bold" if row == 0 else _MARKED if (row - 1, at) in table.marked else ""
                grid.append(gap if at != kept[0] else "")
                grid.append(" " * wide if text is None else text, style)
            grid.append("\n")
    grid.right_crop(1)
    return grid


def _shared(columns: Sequence[_Column], width: int) -> list[int]:
    """Return the widths of columns: the least, and a fair share of what remains of `width` for those that need more."""
    widths = [column.least for column in columns]
    left = width - sum(widths)
    wanting = sorted((column.widest - column.least, at) for at, column in enumerate(columns))
    for count, (need, at) in zip(range(len(wanting), 0, -1), wanting, strict=True):
        share = max(min(need, left // count), 0)
        widths[at] += share
        left -= share
    return widths


def _unbroken(text: str) -> list[str]:
    """Return the parts of `text` that no line break divides: its words, the first of a line with its indent."""
    lines = [_words(line) for line in text.split("\n")]
    return [word.lstrip() if at else word for words in lines for at, word in enumerate(words)]


def _words(text: str) -> list[str]:
    """Return the words of `text`, with the spaces before them.

    A figure and its unit are one word. The parts of a metric's name, such as `output_throughput`, are words.
    """
    words = re.findall(r"\s*\S+(?:(?<=\d) (?:%|ms|s)(?!\w))?", text)
    return [part for word in words for part in (_PARTS.findall(word) if word.strip(" ,") in METRICS else [word])]


def _wrapped(text: str, width: int) -> list[str]:
    """Return `text` in lines that end between words; only a word that is wider than `width` makes a line wider."""
    lines = [""]
    for word in _words(text):
        if lines[-1] and cell_len(lines[-1] + word) > width:
            lines.append(word.lstrip())
        else:
            lines[-1] += word
    return lines
