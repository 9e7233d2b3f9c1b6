"""A validation report: every statistic, simulated against real, and the held-out steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from serving.errors import UserError
from tokentwin.exports.html_report import html_report
from tokentwin.exports.tables import flag_field, number_field, text_field

if TYPE_CHECKING:
    import pyarrow as pa


class Validation:
    """The report in `path`; calibrations and results of `validate external` are looked for under `runs`."""

    what: ClassVar[str] = "a validation report"
    writers: ClassVar[Mapping[str, str]] = {"html": html_report("validation")}

    def __init__(self, path: Path, runs: Path | None = None) -> None:
        """`runs` is by default the directory that the report lies in. Raises UserError when it is damaged."""
        from calibration.validation_report import load_report

        self.path = path
        self.runs = path.resolve().parent if runs is None else runs
        self.report = load_report(path)

    @property
    def tables(self) -> tuple[str, ...]:
        from calibration.validation_report import RESIDUALS

        rows = ("rows",) if self.report.rungs.run and self.report.rungs.run.rows else ()
        return (*rows, "steps") if (self.path / RESIDUALS).is_file() else rows

    def table(self, name: str) -> pa.Table:
        """`rows`: rung 3, with the bands of rung 5. `steps`: measured and predicted time of every held-out step."""
        import pyarrow as pa

        from calibration.validation_report import load_residuals

        if name == "steps":
            steps = load_residuals(self.path, whole=True)
            if steps is None:
                raise UserError("table", name, "is not there; run tokentwin validate again")
            return steps
        found = self.report.rungs.run.rows if self.report.rungs.run else []
        rows = [{**row.model_dump(), "covered": row.covered, "within_floor": row.within_floor} for row in found]
        return pa.Table.from_pylist(rows, schema=_schema())


def _schema() -> pa.Schema:
    import pyarrow as pa

    own = "the metric's"
    return pa.schema(
        [
            text_field("metric", "a metric of the glossary"),
            text_field("stat", "its statistic; `value` where it has but one"),
            number_field("real", own, "on the real engine"),
            number_field("simulated", own, "in the simulator"),
            number_field("error_pct", "%", "simulated against real"),
            number_field("floor_pct", "%", "by how much repeats of the real run differ"),
            number_field("low", own, "lower end of the simulated 90 % band"),
            number_field("high", own, "upper end"),
            flag_field("covered", "whether the band holds the real number"),
            flag_field("within_floor", "whether the error is no larger than the floor"),
        ]
    )
