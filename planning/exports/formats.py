"""The formats in which runs and answers are exported. Not all of them have every format; see `exportable`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """A format: its name and description, and the suffix and media type of its files; `tabular` if it has one table."""

    label: str
    what: str
    suffix: str
    mime: str
    tabular: bool = False


FORMATS = {
    "parquet": Format(
        "Parquet", "a table with types, units and definitions", ".parquet", "application/vnd.apache.parquet", True
    ),
    "csv": Format("CSV", "a table for spreadsheets", ".csv", "text/csv", True),
    "html": Format("Report", "a report in one file, with its charts", ".html", "text/html"),
    "json": Format("JSON", "the complete answer, which can be exported again", ".json", "application/json"),
    "perfetto": Format("Perfetto trace", "a trace for ui.perfetto.dev", ".trace.json", "application/json"),
    "openmetrics": Format(
        "OpenMetrics",
        "metrics as in vLLM's /metrics at the end",
        ".om.txt",
        "application/openmetrics-text",
    ),
}
