"""A run of NVIDIA's AIPerf: `profile_export.jsonl` (a row per request) beside `profile_export_aiperf.json`.

https://github.com/ai-dynamo/aiperf, `docs/tutorials/working-with-profile-exports.md`. Start times are nanoseconds since
the epoch, and latencies are milliseconds from the request's own start. A phase of type `concurrency` is a closed loop.
In a run of conversations (`turn_index`), a turn comes after the answer to the one before, and extends its prompt.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from tokentwin.serving.errors import UserError
from tokentwin.serving.settings import Settings
from tokentwin.traces.formats.rows import Row, json_rows
from tokentwin.traces.formats.sessions import Call, Turn, recorded_sessions, workload_of_sessions
from tokentwin.traces.measured.json_file import MANY, JsonFile
from tokentwin.traces.measured.run import MeasuredRun, Observed, run_of_requests

_MS_NS = 10**6


class AiPerf(Settings):
    """One run in AIPerf's artifact directory `folder`; warm-up requests are left out.

    `shared_prefix_tokens` is the number of tokens at the start of all prompts that are equal.
    """

    format: Literal["aiperf"] = "aiperf"
    folder: str
    shared_prefix_tokens: int = Field(0, ge=0)

    def read(self, data: Path) -> list[MeasuredRun]:
        """See `MeasuredFormat`.

        The client measured TTFT and E2E. It counted the lengths itself or got them from the server.
        """
        folder = data / self.folder
        path = folder / "profile_export.jsonl"
        rows = [row for row in map(_flat, json_rows(path)) if row.text("benchmark_phase") == "profiling"]
        answered = [row for row in rows if row.fields["error"] is None and not row.fields.get("was_cancelled")]
        if not answered:
            raise UserError("measured.folder", str(path), "holds no answered request")
        answered.sort(key=lambda row: row.integer("request_start_ns", 0))
        start_ns = answered[0].integer("request_start_ns", 0)
        observed = [_observed(id_, row, start_ns) for id_, row in enumerate(answered)]
        slots, rate = _load(JsonFile(folder / "profile_export_aiperf.json"))
        failed = len(rows) - len(answered)
        run = run_of_requests(
            folder.name,
            observed,
            slots,
            self.shared_prefix_tokens,
            caution=f"{failed} requests failed and are left out" if failed else "",
            by_client=True,
            offered_per_s=rate,
        )
        if not any(row.integer("turn_index", 0, default=0) for row in answered):
            return [run]
        if self.shared_prefix_tokens:
            raise UserError("shared_prefix_tokens", self.shared_prefix_tokens, "must be 0 for conversations")
        sessions, cautions = recorded_sessions(map(_call, observed, answered))
        return [replace(run, workload=workload_of_sessions(folder, sessions, cautions=cautions))]


def _flat(row: Row) -> Row:
    """Return the row with the fields of its metadata and the values of its metrics as plain fields."""
    objects: list[dict[str, Any]] = []
    for name in ("metadata", "metrics"):
        value = row.fields.get(name)
        if not isinstance(value, dict):
            raise row.error(name, value, "must be an object")
        objects.append(value)
    metadata, metrics = objects
    values = {name: metric.get("value") for name, metric in metrics.items() if isinstance(metric, dict)}
    return Row(row.path, row.line, {**values, **metadata, "error": row.fields.get("error")})


def _observed(id_: int, row: Row, start_ns: int) -> Observed:
    if "time_to_first_token" not in row.fields:
        raise row.error("time_to_first_token", None, "is missing; run aiperf with --streaming")
    arrival_ns = row.integer("request_start_ns", 0) - start_ns
    ttft_ns, e2e_ns = (row.time_ns(name, _MS_NS) for name in ("time_to_first_token", "request_latency"))
    if ttft_ns > e2e_ns:
        raise row.error("time_to_first_token", row.fields["time_to_first_token"], "must not exceed request_latency")
    prompt, outputs = row.tokens("input_sequence_length"), row.tokens("output_sequence_length")
    return Observed(id_, prompt, outputs, arrival_ns, arrival_ns + ttft_ns, arrival_ns + e2e_ns)


def _call(observed: Observed, row: Row) -> Call:
    """Return a turn of a conversation; a conversation that is sent several times has several correlation ids."""
    session = row.text("x_correlation_id") or row.text("conversation_id")
    turn = Turn(observed.output_tokens, observed.prompt_tokens)
    return Call(observed.arrival_ns, observed.finish_ns, session, turn)


def _load(report: JsonFile) -> tuple[int | None, float | None]:
    """Return (concurrency of a closed loop, rate of a client with a send rate); the other one is None."""
    phases = report.get("input_config.phases")
    for at, phase in enumerate(phases if isinstance(phases, list) else []):
        path = f"input_config.phases.{at}"
        if isinstance(phase, dict) and phase.get("kind", "profiling") == "profiling":
            if phase.get("type") == "concurrency":
                return int(report.number(f"{path}.concurrency", 1, MANY)), None
            return None, report.number(f"{path}.rate", 1e-6) if phase.get("rate") is not None else None
    raise report.error("input_config.phases", phases, "must hold the phase that was profiled")
