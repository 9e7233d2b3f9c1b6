"""A validation report for export: every statistic with its simulated and real value, and the held-out steps."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pyarrow as pa

from tokentwin.calibration.validation.report import RESIDUALS, load_report, load_residuals
from tokentwin.serving.errors import UserError


class Validation:
    """The report in `path`; calibrations and results of `validate external` are searched under `runs`."""

    what: ClassVar[str] = "a validation report"

    def __init__(self, path: Path, runs: Path | None = None) -> None:
        """Load the report. `runs` is by default its parent directory. Raises UserError if the report is damaged."""
        self.path = path
        self.runs = path.resolve().parent if runs is None else runs
        self.report = load_report(path)

    @property
    def tables(self) -> tuple[str, ...]:
        return (*self.report.tables, *(("steps",) if (self.path / RESIDUALS).is_file() else ()))

    def table(self, name: str) -> pa.Table:
        """Return `rows`, the report's rows, or `steps`, the measured and predicted time of every held-out step."""
        if name != "steps":
            return self.report.table(name)
        steps = load_residuals(self.path, whole=True)
        if steps is None:
            raise UserError("table", name, "is missing; run tokentwin validate again")
        return steps
