"""Phases of a GuideLLM sweep, recorded by vLLM's own OpenTelemetry spans in `server_requests.csv`.

A row per request has the arrival at the server, prompt and output tokens, TTFT and end-to-end latency in seconds, and
the phase. The prompts of a phase share their first tokens with each other, but not with other phases. Each phase is a
separate run, because it ends before the next phase begins. A synchronous or concurrent phase is a closed loop. A file
without phases is one run with given arrival times.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from tokentwin.serving.errors import UserError
from tokentwin.serving.settings import Settings
from tokentwin.traces.formats.rows import Row, csv_rows
from tokentwin.traces.measured.run import MeasuredRun, Observed, run_of_requests

SECOND_NS = 10**9


class GuideLlmSpans(Settings):
    """A sweep in one file; the prompts of a phase share their first `shared_prefix_tokens` tokens."""

    format: Literal["guidellm-spans"] = "guidellm-spans"
    file: str
    shared_prefix_tokens: int = Field(0, ge=0)

    def read(self, data: Path) -> list[MeasuredRun]:
        """See `MeasuredFormat`. Times are from the arrival at the server, without HTTP and the client."""
        path = data / self.file
        phases: dict[str, list[Row]] = {}
        for row in csv_rows(path):
            phases.setdefault(f"{row.text('phase')} {row.text('phase_kind')}".strip() or "all", []).append(row)
        if not phases:
            raise UserError("measured.file", str(path), "holds no requests")
        return [self._run(name, rows) for name, rows in phases.items()]

    def _run(self, name: str, rows: Sequence[Row]) -> MeasuredRun:
        rows = sorted(rows, key=lambda row: row.time_ns("arrival_s", SECOND_NS))
        start = rows[0].time_ns("arrival_s", SECOND_NS)
        observed = [_observed(id_, row, start) for id_, row in enumerate(rows)]
        return run_of_requests(name, observed, _concurrency(rows[0]), self.shared_prefix_tokens)


def _concurrency(row: Row) -> int | None:
    """Return the concurrency of a closed loop; None for a phase that sends at given times."""
    kind, _, slots = row.text("phase_kind").partition("@")
    if kind == "synchronous":
        return 1
    return int(slots) if kind == "concurrent" and slots.isdigit() else None


def _observed(id_: int, row: Row, start: int) -> Observed:
    arrival = row.time_ns("arrival_s", SECOND_NS) - start
    ttft, e2e = row.time_ns("ttft_s", SECOND_NS), row.time_ns("e2e_s", SECOND_NS)
    if ttft > e2e:
        raise row.error("ttft_s", row.fields["ttft_s"], "must not be longer than e2e_s")
    prompt, outputs = row.integer("prompt_tokens", 1), row.integer("output_tokens", 1)
    return Observed(id_, prompt, outputs, arrival, arrival + ttft, arrival + e2e)
