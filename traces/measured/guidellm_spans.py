"""Phases of a GuideLLM sweep, as vLLM's own OpenTelemetry spans saw them: `server_requests.csv`.

One row a request: arrival at the server, prompt and output tokens, TTFT and end-to-end latency in seconds, and the
phase. The prompts of a phase share their first tokens; the next phase has others. Each phase is a run of its own, since
one ends before the next begins. A synchronous or concurrent phase is a closed loop: it sends when an answer is there.
A file without phases is one run, sent by the clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from serving.errors import UserError
from serving.settings import Settings
from traces.formats.rows import Row, csv_rows
from traces.measured.run import MeasuredRun, Observed, run_of_requests

SECOND_NS = 10**9


class GuideLlmSpans(Settings):
    """A sweep in one file; `shared_prefix_tokens` is how many tokens the prompts of a phase begin with alike."""

    format: Literal["guidellm-spans"] = "guidellm-spans"
    file: str
    shared_prefix_tokens: int = Field(0, ge=0)

    def read(self, data: Path) -> list[MeasuredRun]:
        """See `MeasuredFormat`. Times count from arrival at the server; HTTP and the client are not in them."""
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
    """Slots of a closed loop; None for a phase that sends by the clock."""
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
