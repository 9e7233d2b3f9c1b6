"""Tables on a terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from tokentwin.serving.answers.report import FIGURE, Column, Table


def print_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], title: str = "", right: Collection[str] = ()
) -> None:
    """Print rows under their headings; columns in `right` are right-aligned."""
    from tokentwin.serving.answers.terminal import print_report

    columns = [Column(heading, FIGURE if heading in right else None) for heading in headings]
    print_report([Table(columns, list(rows), title)])
