"""A sweep's dataset: a row for every run, and what of it is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import pyarrow as pa

if TYPE_CHECKING:
    from planning.sweep.results import SweepResults


class SweepView(NamedTuple):
    """Metric `y` over parameter `x`, a series for each of `values` of parameter `by`; (None,) without one."""

    y: str
    x: str
    by: str | None
    values: Sequence[Any]
    log_y: bool = False


class Sweep:
    """A sweep, or some runs of one; `view` is what the report draws, by default what the page opens on."""

    what: ClassVar[str] = "a sweep"
    tables = ("runs",)

    def __init__(self, path: Path, results: SweepResults | None = None, view: SweepView | None = None) -> None:
        """The dataset in `path`, unless `results` of it are given. Raises UserError when it is damaged."""
        from planning.sweep.results import SweepResults

        self.path, self.view = path, view
        self.results = SweepResults.load(path) if results is None else results

    def table(self, name: str) -> pa.Table:
        """Parameters, metrics and where each run comes from; failed runs are rows, too."""
        return self.results.runs
