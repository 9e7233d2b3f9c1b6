"""The table of operations on the pages of a step and of a run."""

from __future__ import annotations

from collections.abc import Sequence

from tokentwin.calibration.steps.explanation import ExplainedOperation
from tokentwin.dashboard.sheet import Sheet
from tokentwin.serving.answers.report import Form, Table

_TENTHS = Form("{:,.1f}".format, "%.1f")


def operation_table(to: Sheet, operations: Sequence[ExplainedOperation], **amounts: Sequence[float]) -> None:
    """Draw a row for each operation: its name, the `amounts` by column name, and its share of the roofline."""
    columns = {
        "operation": [o.name for o in operations],
        "trust": [o.level.word for o in operations],
        **amounts,
        "of roofline (%)": [100 * o.utilisation for o in operations],
        "bound by": [o.bound for o in operations],
        "error within (± %)": [100 * o.sigma for o in operations],
    }
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    to.table(Table.from_rows(rows, {name: _TENTHS for name in columns if rows and isinstance(rows[0][name], float)}))
