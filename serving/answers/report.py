"""A report: an answer as lines and tables, which each medium draws in its own way.

A terminal, a Markdown file, a page and an HTML file draw the same report. Each medium chooses fonts and colours, but
adds no words or figures.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from tokentwin.serving.answers.figures import (
    NOTHING,
    shown_band,
    shown_change,
    shown_number,
    shown_percent,
    shown_share,
    shown_usd,
)
from tokentwin.serving.metrics import METRICS, metric


class Form(NamedTuple):
    """The format of the cells of a column.

    `shown` returns a value as text. On a page, `named` replaces `shown` if it is set, and `printf` is the format of
    numbers, which a page can sort; `scaled` gives these numbers.
    """

    shown: Callable[[Any], str]
    printf: str = ""
    named: Callable[[Any], str] | None = None
    scaled: Callable[[Any], Any] = lambda value: value


def _name_and_unit(name: str) -> str:
    about = METRICS.get(name.removesuffix("_peak"))
    return f"{name}, {about.read_unit}" if about and about.read_unit and not name.endswith(f"_{about.unit}") else name


def _label_and_unit(name: str) -> str:
    known = name.removesuffix("_peak")
    return name if known not in METRICS else metric(known).read_as + " at its peak" * (known != name)


_WORDS = {None: "", True: "yes", False: "no"}
NUMBER = Form(partial(shown_number, digits=4), "%.5g")
COUNT = Form(lambda count: NOTHING if count is None else f"{count:,}", "localized")
PERCENT = Form(shown_percent, "%.1f %%")
CHANGE = Form(shown_change, "%+.1f %%")


def _in_percent(share: float | None) -> float | None:
    """Return a share in percent; as in `shown_share`, only exactly 0 is shown as 0, and only exactly 1 as 100."""
    if share is None or not 0 < share < 1:
        return None if share is None else 100 * share
    return min(max(100 * share, 0.1), 99.9)


SHARE = Form(partial(shown_share, decimals=1), "%.1f %%", scaled=_in_percent)
USD = Form(shown_usd, "dollar")
BAND = Form(lambda ends: shown_band(ends[0], ends[1], 4))
FIGURE = Form(lambda figure: figure)  # a figure that is text already
METRIC = Form(str, named=_label_and_unit)  # the name of a metric; a page shows its label
METRIC_AND_UNIT = Form(_name_and_unit, named=_label_and_unit)


class Column(NamedTuple):
    """A column: its name, the format of its figures (None if it holds text), and its meaning.

    A narrow terminal leaves out columns with a `spare` above 0. It first leaves out the columns with the highest
    number, and always leaves out columns with equal numbers together.
    """

    name: str
    form: Form | None = None
    help: str | None = None
    spare: int = 0

    @property
    def right(self) -> bool:
        """True if the column's cells are figures, which are right-aligned."""
        return self.form is not None and self.form.named is None

    @property
    def printf(self) -> str:
        """The format in which a page shows the column's numbers; empty for texts."""
        return self.form.printf if self.form else ""

    def number(self, value: Any) -> Any:
        """Return the number that `printf` formats."""
        return self.form.scaled(value) if self.form else value

    def text(self, value: Any, page: bool = False) -> str:
        """Return a cell as text."""
        if self.form is None:
            return _WORDS[value] if value is None or isinstance(value, bool) else str(value)
        return ((page and self.form.named) or self.form.shown)(value)


@dataclass(frozen=True)
class Table:
    """Rows of values under their columns.

    `marked` holds the (row, column) of cells whose value misses its target. `sentences` is True if the rows are whole
    sentences.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    title: str = ""
    marked: Collection[tuple[int, int]] = ()
    sentences: bool = False

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[str, Any]], forms: Mapping[str, Form] | None = None) -> Table:
        """Return rows as a table; a column without a form in `forms` holds text or plain numbers."""
        names = list(dict.fromkeys(name for row in rows for name in row))
        cells = [[row.get(name) for name in names] for row in rows]
        return cls([Column(n, (forms or {}).get(n) or _usual(row.get(n) for row in rows)) for n in names], cells)

    @property
    def titles(self) -> list[str]:
        """The names of the columns, each without line breaks."""
        return [column.name.replace("-\n", "").replace("\n", " ") for column in self.columns]

    def texts(self, page: bool = False) -> list[list[str]]:
        """Return the cells as text."""
        return [[column.text(cell, page) for column, cell in zip(self.columns, row, strict=True)] for row in self.rows]


def _usual(values: Iterable[Any]) -> Form | None:
    known = [value for value in values if value is not None]
    numbers = known and all(isinstance(value, int | float) and not isinstance(value, bool) for value in known)
    return NUMBER if numbers else None


@dataclass(frozen=True)
class Line:
    """A line. Its tone says whether it is text, a headline, a title, a note, a warning or a command to type."""

    text: str
    tone: Literal["text", "headline", "title", "note", "warning", "command"] = "text"

    def __str__(self) -> str:
        return self.text


Report = Iterable[Line | Table]
