"""Azure LLM inference traces: CSV files with the columns TIMESTAMP, ContextTokens and GeneratedTokens.

https://github.com/Azure/AzurePublicDataset, 2023 (100 ns timestamps, CRLF) and 2024 (with a UTC offset). The traces
have no prompts, so the prompts are assumed to share nothing. The first arrival is time 0.
"""

from __future__ import annotations

from pathlib import Path

from tokentwin.serving.workload import PRIVATE, Workload, WorkloadRequest
from tokentwin.traces.formats.rows import csv_rows, named_workload

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class AzureReader:
    """A reader of Azure's public traces: CSV files with a timestamp and two numbers of tokens per request."""

    name = "azure"

    def matches(self, head: bytes) -> bool:
        header = head.splitlines()[0]
        return b"TIMESTAMP" in header and b"ContextTokens" in header

    def read(self, path: Path) -> Workload:
        rows = [
            (row.instant_ns("TIMESTAMP"), row.tokens("ContextTokens"), row.output_tokens("GeneratedTokens"))
            for row in csv_rows(path, *_COLUMNS)
        ]
        rows.sort(key=lambda row: row[0])
        requests = [
            WorkloadRequest(id_, time_ns - rows[0][0], ((PRIVATE, prompt),), output)
            for id_, (time_ns, prompt, output) in enumerate(rows)
        ]
        return named_workload(path, requests)
