"""The datasets `requests` and `steps` of a run in memory, with the interface of a recording.

`RunMetrics` takes either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from traces.numeric_columns import has_value
from traces.recording import Recording
from traces.schema import DATASETS

_NOTHING = pa.table({})


class MemoryTables:
    """Datasets in memory. A dataset that is not given has no rows."""

    def __init__(self, **datasets: pa.Table) -> None:
        self._tables = {"requests": _NOTHING, "steps": _NOTHING, **datasets}

    def table(self, dataset: str, columns: Sequence[str]) -> pa.Table:
        stored = self._tables[dataset]
        present = set(stored.column_names)
        return pa.table({name: stored[name] if name in present else self._null(dataset, name) for name in columns})

    def _null(self, dataset: str, name: str) -> pa.Array:
        (type_,) = (column.type for column in DATASETS[dataset] if column.name == name)
        return pa.nulls(self.rows(dataset), type_)

    def pieces(self, dataset: str, columns: Sequence[str], rows: int) -> Iterator[pa.Table]:
        table = self.table(dataset, columns)
        return (table.slice(at, rows) for at in range(0, table.num_rows, rows))

    def rows(self, dataset: str) -> int:
        return int(self._tables[dataset].num_rows)

    def filled(self, dataset: str, columns: Sequence[str]) -> list[str]:
        return [name for name in columns if has_value(self._tables[dataset], name)]

    def most_items(self, dataset: str, column: str) -> int:
        """Return the number of items in all lists of a column, or a larger number."""
        return sum(len(chunk.values) for chunk in self.table(dataset, [column]).column(0).chunks)


Datasets = Recording | MemoryTables
"""The tables that metrics read. A missing column is null."""
