"""The table of operations on the pages of a step and of a run."""

from __future__ import annotations

from collections.abc import Sequence

from calibration.steps.explanation import ExplainedOperation
from dashboard.sheet import Sheet


def operation_table(to: Sheet, operations: Sequence[ExplainedOperation], **amounts: Sequence[float]) -> None:
    """Draw a row for each operation: its name, the `amounts` by column name, and its share of the roofline."""
    columns = {
        "operation": [o.name for o in operations],
        "trust": [o.level.word for o in operations],
        **amounts,
        "of roofline (%)": [100 * o.utilisation for o in operations],
        "bound by": [o.bound for o in operations],
        "known to (± %)": [100 * o.sigma for o in operations],
    }
    decimals = [name for name, values in columns.items() if isinstance(values[0], float)] if operations else []
    to.table(columns, dict.fromkeys(decimals, "%.1f"))
