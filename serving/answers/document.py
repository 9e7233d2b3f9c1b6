"""The base of every saved answer: one JSON document, which is checked when it is read.

A terminal, a page and a file show the document's report. The report is made from the document alone, so a saved
document shows the same report as a new one. Fields that a later version adds are ignored. A damaged document gives a
one-line error.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from tokentwin.serving.answers.report import Report
from tokentwin.serving.data_file import with_present_names
from tokentwin.serving.deployments.config import parse
from tokentwin.serving.errors import UserError
from tokentwin.serving.metrics import metric

if TYPE_CHECKING:
    from rich.console import RenderableType

Read = TypeVar("Read", bound="Document")
_NOTEBOOK_COLUMNS = 120


def _none_if_infinite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.12g}")
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return tuple(map(_rounded, value)) if type(value) is tuple else value


Number = Annotated[float | None, BeforeValidator(_none_if_infinite)]  # JSON has no NaN and no infinities


def fact(description: str, unit: str = "", **more: Any) -> Any:
    """Return a field with its meaning and, for a number, its unit. `more` is passed on to pydantic's `Field`."""
    return Field(description=description, json_schema_extra={"unit": unit}, **more)


def metric_fact(name: str) -> Any:
    """Return a field that holds a metric of the glossary."""
    return fact(metric(name).definition, metric(name).unit)


class Part(BaseModel):
    """A part of a document. It is frozen, and its numbers are finite and rounded to twelve significant digits.

    Digits beyond the twelfth depend on the vector units of the CPU that computed the sums.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False, defer_build=True)

    @field_validator("*")
    @classmethod
    def _to_twelve_digits(cls, value: Any, info: ValidationInfo) -> Any:
        return value if info.field_name == "inputs" else _rounded(value)  # inputs stay as they were given

    def as_json(self) -> dict[str, Any]:
        """Return the part as plain JSON data, for scripts and for reading it again."""
        return self.model_dump(mode="json")


class Answer:
    """An answer that returns its tables, and shows its report on a terminal and in a notebook."""

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the answer's tables, the main one first."""
        raise NotImplementedError

    def table(self, name: str) -> Any:
        """Return a table as a `pyarrow.Table`; the metadata of its fields holds units and definitions."""
        raise NotImplementedError

    def report(self) -> Report:
        """Yield the lines and tables of the report from top to bottom, for any medium."""
        raise NotImplementedError

    def to_arrow(self, table: str | None = None) -> Any:
        """Return the table with this name, by default the main one. Raises UserError if there is no such table."""
        if table is not None and table not in self.tables:
            raise UserError("table", table, f"does not exist here; choose one of {', '.join(self.tables)}")
        return self.table(table or self.tables[0])

    def to_pandas(self, table: str | None = None) -> Any:
        """Return `to_arrow` as a `pandas.DataFrame`."""
        return self.to_arrow(table).to_pandas()

    def __rich_console__(self, console: Any, options: Any) -> Iterator[RenderableType]:
        from tokentwin.serving.answers.terminal import on_terminal

        yield from on_terminal(self.report(), options.max_width)

    def _repr_html_(self) -> str:
        """Return the report as HTML for notebooks."""
        from tokentwin.serving.answers.terminal import Terminal, print_report

        console = Terminal(record=True, file=io.StringIO(), width=_NOTEBOOK_COLUMNS, force_jupyter=False)
        print_report(self.report(), console)
        return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


class Document(Part, Answer):
    """An answer that is one document. `what` is its name in messages; `where` precedes its field names in errors."""

    what: ClassVar[str]
    where: ClassVar[str]

    schema_version: Literal[1] = fact("raised when an older reader would misread the document", default=1)

    @classmethod
    def read(cls: type[Read], data: Any) -> Read:
        """Read the document from plain JSON data. Raises UserError that names the first wrong field."""
        return parse(cls, with_present_names(data), where=cls.where, typed=True)

    def dumps(self, indent: int | None = None) -> str:
        """Return `as_json` as text."""
        return json.dumps(self.as_json(), indent=indent, allow_nan=False)
