"""How far long work is: what it tells of itself, and one progress bar on stderr, silent where nobody looks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Tell = Callable[[str, float], None]  # the stage that work is at, and the share of all of it that is done


def untold(stage: str, share: float) -> None:
    """For when nobody asks."""


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar labelled `what`; call the yielded function with how many of `total` are done."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)
