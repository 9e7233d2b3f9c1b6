"""A sweep's dataset for export, with a row for every run, and the view that its report draws."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import pyarrow as pa

if TYPE_CHECKING:
    from tokentwin.planning.sweep.results import SweepResults


class SweepView(NamedTuple):
    """A view of a sweep, with metric `y`.

    A line or a scatter has a series for each of `values` of parameter `by`; (None,) if `by` is None. A `line` is over
    parameter `x`; a `scatter` has a point for each run, over a parameter or another metric. A `heat map` has a column
    for each value of parameter `x`, and a row for each value of `by`.
    """

    y: str
    x: str
    by: str | None
    values: Sequence[Any]
    log_y: bool = False
    kind: str = "line"


class Sweep:
    """A sweep, or some runs of a sweep; the report draws `view`, by default the first view of the dashboard's page."""

    what: ClassVar[str] = "a sweep"
    tables = ("runs",)

    def __init__(self, path: Path, results: SweepResults | None = None, view: SweepView | None = None) -> None:
        """Load the dataset in `path`, unless its `results` are given. Raises UserError if it is damaged."""
        from tokentwin.planning.sweep.results import SweepResults

        self.path, self.view = path, view
        self.results = SweepResults.load(path) if results is None else results

    def table(self, name: str) -> pa.Table:
        """Return a table with the parameters, metrics and origin of each run, including failed runs."""
        return self.results.runs
