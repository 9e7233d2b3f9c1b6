"""Tables on a terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    title: str | None = None,
    right: Collection[str] = (),
    **style: Any,
) -> None:
    """Print rows under their headings; columns in `right` are right-aligned.

    `style` are arguments of rich's `Table`.
    """
    from rich.table import Table

    from serving.terminal import Terminal

    table = Table(title=title, title_justify="left", **style)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Terminal().print(table)
