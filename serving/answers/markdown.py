"""Reports and tables in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from tokentwin.serving.answers.report import Line, Report, Table

_LINES = {"headline": "**{}**", "title": "### {}", "warning": "> {}", "command": "```\n{}\n```"}


def markdown(report: Report) -> str:
    """Return a report in Markdown; its texts are escaped, so that nothing in them is read as Markdown."""
    return "\n\n".join(_parts(report)) + "\n"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[bool] = ()) -> str:
    """Return a table in Markdown. Its cells are Markdown already; `right` is True for right-aligned columns."""
    first, *others = ("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in (header, *rows))
    rule = "".join("--:|" if at < len(right) and right[at] else "---|" for at in range(len(header)))
    return "\n".join((first, f"|{rule}", *others))


def _parts(report: Report) -> Iterator[str]:
    for part in report:
        if isinstance(part, Line):
            text = part.text if part.tone == "command" else _plain(part.text)
            yield _LINES.get(part.tone, "{}").format(text)
            continue
        if part.title:
            yield _LINES["title"].format(_plain(part.title))
        yield _table(part)


def _table(table: Table) -> str:
    rows = [
        [f"**{_plain(text)}**" if (row, at) in table.marked else _plain(text) for at, text in enumerate(cells)]
        for row, cells in enumerate(table.texts())
    ]
    return markdown_table(list(map(_plain, table.titles)), rows, [column.right for column in table.columns])


def _plain(text: str) -> str:
    """Return a text escaped, so that Markdown shows it unchanged, and on one line."""
    return re.sub(r"([\\`*<\[])", r"\\\1", " ".join(text.split()))
