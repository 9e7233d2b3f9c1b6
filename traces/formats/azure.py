"""Azure LLM inference traces: CSV files with the columns TIMESTAMP, ContextTokens and GeneratedTokens.

https://github.com/Azure/AzurePublicDataset, 2023 (100 ns timestamps, CRLF) and 2024 (with a UTC offset). The traces
have no prompts, so the prompts are assumed to share nothing. The first arrival is time 0.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from tokentwin.serving.workload import Workload
from tokentwin.traces.distributions import LONGEST
from tokentwin.traces.formats.request_table import RequestTable
from tokentwin.traces.formats.rows import csv_rows, named_workload, since_first
from tokentwin.traces.formats.text_columns import NotPlain, csv_batches, instants_ns, whole_numbers

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_FIELDS = ["arrival_ns", "prompt_len", "output_len"]


class AzureReader:
    """A reader of Azure's public traces: CSV files with a timestamp and two numbers of tokens per request."""

    name = "azure"

    def matches(self, head: bytes) -> bool:
        header = head.splitlines()[0]
        return b"TIMESTAMP" in header and b"ContextTokens" in header

    def read(self, path: Path) -> Workload:
        try:
            table = _plain(path)
        except NotPlain:
            rows = [
                (row.instant_ns("TIMESTAMP"), row.tokens("ContextTokens"), row.output_tokens("GeneratedTokens"))
                for row in csv_rows(path, *_COLUMNS)
            ]
            table = pa.table([pa.array([row[at] for row in rows], pa.int64()) for at in range(3)], _FIELDS)
        return named_workload(path, RequestTable.in_memory(since_first(path, table)))


def _plain(path: Path) -> pa.Table:
    """Return the arrivals and lengths of a plain file."""
    tables = []
    for cells in csv_batches(path, *_COLUMNS):
        if len(cells) < len(_COLUMNS):
            raise NotPlain
        times, prompts, outputs = (cells[name] for name in _COLUMNS)
        lengths = whole_numbers(prompts, 1, LONGEST), whole_numbers(outputs, 0, LONGEST)
        tables.append(pa.table([instants_ns(times), *lengths], _FIELDS))
    return pa.concat_tables(tables)
