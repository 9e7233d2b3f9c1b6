"""Progress of long work: what it reports, and one progress bar on stderr, or log lines where that is no terminal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

LOG = logging.getLogger("tokentwin")
Tell = Callable[[str, float], None]  # the stage that work is at, and the share of all of it that is done


def quiet(stage: str, share: float) -> None:
    """Reports nothing."""


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar labelled `what`; call the yielded function with how many of `total` are done."""
    from rich.progress import MofNCompleteColumn

    with _bar(what, total, MofNCompleteColumn()) as update:
        yield lambda done: update(what, done)


@contextmanager
def telling() -> Iterator[Tell]:
    """A bar that is labelled with the stage, for what takes a `Tell`."""
    from rich.progress import TaskProgressColumn

    with _bar("starting", 1, TaskProgressColumn()) as update:
        yield update


@contextmanager
def _bar(what: str, total: int, figures: ProgressColumn) -> Iterator[Tell]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda stage, done: LOG.info("%s: %.0f %% done", stage, 100 * done / max(total, 1))
        return
    columns = (TextColumn("{task.description}"), BarColumn(), figures, TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda stage, done: progress.update(task, description=stage, completed=done)
