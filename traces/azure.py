"""Azure LLM inference traces: CSV of TIMESTAMP, ContextTokens, GeneratedTokens.

https://github.com/Azure/AzurePublicDataset, 2023 (100 ns timestamps, CRLF) and 2024 (with a UTC offset). They
hold no prompts, so every prompt is private. The first arrival is time 0.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from serving.workload import PRIVATE, Workload, WorkloadRequest
from traces.rows import Row, csv_rows, workload_of

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class AzureReader:
    name = "azure"

    def matches(self, head: bytes) -> bool:
        header = head.splitlines()[0]
        return b"TIMESTAMP" in header and b"ContextTokens" in header

    def read(self, path: Path) -> Workload:
        rows = [
            (_time_ns(row), row.tokens("ContextTokens"), row.tokens("GeneratedTokens"))
            for row in csv_rows(path, *_COLUMNS)
        ]
        rows.sort(key=lambda row: row[0])
        requests = [
            WorkloadRequest(id_, time_ns - rows[0][0], ((PRIVATE, prompt),), output)
            for id_, (time_ns, prompt, output) in enumerate(rows)
        ]
        return workload_of(path, requests)


def _time_ns(row: Row) -> int:
    text = row.text("TIMESTAMP")
    match = _TIMESTAMP.fullmatch(text)
    try:
        if match is None:
            raise ValueError(text)
        second, fraction, offset = match.groups()
        return _second_ns(second, offset or "Z") + int((fraction or "").ljust(9, "0"))
    except ValueError:
        raise row.error("TIMESTAMP", text, "must look like 2023-11-16 18:15:46.6805900") from None


@lru_cache(maxsize=64)
def _second_ns(second: str, offset: str) -> int:
    since = datetime.fromisoformat(second + offset) - _EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000_000
