"""A recording for export: its requests and steps, with the metrics that have a value for each row."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pyarrow as pa

from tokentwin.serving.metrics import metric
from tokentwin.traces.metrics.run_metrics import REQUEST_METRICS, RunMetrics
from tokentwin.traces.metrics.step_metrics import STEP_METRICS
from tokentwin.traces.recording import Recording

_RECORDED = {"running", "waiting"}  # metrics that are columns of `steps` already


class RecordedRun:
    """A recorded run, real or simulated."""

    what: ClassVar[str] = "a recording"

    def __init__(self, source: Path | Recording, name: str = "", runs: Path | None = None) -> None:
        """Take a directory, or a recording that is open already. Raises UserError if it is damaged.

        `name` is by default the name of the directory. The calibration of the recording's steps is searched in the
        directory `runs`, by default the parent directory.
        """
        self.recording = source if isinstance(source, Recording) else Recording.load(str(source))
        folder = self.recording.path.resolve()
        self.name = name or folder.name
        self.runs = folder.parent if runs is None else runs

    @property
    def tables(self) -> tuple[str, ...]:
        return ("requests", "steps") if sum(self.recording.group_rows("steps")) else ("requests",)

    def table(self, name: str) -> pa.Table:
        """Return the dataset `name`, with its metrics as further columns (float64, null if there is no value)."""
        table, metrics = self.recording.table(name), RunMetrics.from_recording(self.recording)
        for of_row in REQUEST_METRICS if name == "requests" else STEP_METRICS:
            if of_row not in _RECORDED:
                known, values = metric(of_row), pa.array(metrics.values(of_row), from_pandas=True)
                about = {"unit": known.unit, "definition": known.definition}
                table = table.append_column(pa.field(of_row, pa.float64(), metadata=about), values)
        return table
