"""The requests or the steps of a recording as one table, with the metrics that have a value for each row beside them.

Every column carries its unit and definition. CSV has neither types nor lists: a list becomes its values with spaces in
between, a map JSON, and null an empty field.
"""

from __future__ import annotations

import json
from typing import IO, TYPE_CHECKING

from serving.metrics import metric

if TYPE_CHECKING:
    import pyarrow as pa

    from traces.recording import Recording

_RECORDED = {"running", "waiting"}  # metrics that are columns of `steps` already


def exported_table(recording: Recording, name: str) -> pa.Table:
    """The dataset `name`, `requests` or `steps`, and its metrics as further columns (float64, null for none)."""
    import pyarrow as pa

    from traces.run_metrics import REQUEST_METRICS, STEP_METRICS, RunMetrics

    table, metrics = recording.table(name), RunMetrics.of(recording)
    for of_row in REQUEST_METRICS if name == "requests" else STEP_METRICS:
        if of_row not in _RECORDED:
            known = metric(of_row)
            field = pa.field(of_row, pa.float64(), metadata={"unit": known.unit, "definition": known.definition})
            table = table.append_column(field, pa.array(metrics.values(of_row), from_pandas=True))
    return table


def write_parquet(recording: Recording, out: IO[bytes], name: str) -> None:
    """`exported_table` as a Parquet file."""
    as_parquet(exported_table(recording, name), out)


def write_csv(recording: Recording, out: IO[bytes], name: str) -> None:
    """`exported_table` as CSV."""
    as_csv(exported_table(recording, name), out)


def as_parquet(table: pa.Table, out: IO[bytes]) -> None:
    """Any table as a Parquet file, with the metadata of its fields."""
    import pyarrow.parquet as pq

    pq.write_table(table, out, compression="zstd")


def as_csv(table: pa.Table, out: IO[bytes]) -> None:
    """Any table as CSV, with a header."""
    import pyarrow as pa
    import pyarrow.csv as csv

    for index, field in enumerate(table.schema):
        if pa.types.is_nested(field.type):
            flat = [_text(value) for value in table.column(index).to_pylist()]
            table = table.set_column(index, field.name, pa.array(flat, pa.string()))
    csv.write_csv(table, out)


def _text(value: list[int] | list[tuple[str, int]] | None) -> str | None:
    if value is None:
        return None
    if value and isinstance(value[0], tuple):
        return json.dumps(dict(value))
    return " ".join(map(str, value))
