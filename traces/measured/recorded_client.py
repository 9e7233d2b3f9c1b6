"""Client recordings of runs of any server, made by `tokentwin bench --url`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import pyarrow as pa
from pydantic import Field

from tokentwin.serving.errors import UserError
from tokentwin.serving.settings import Settings
from tokentwin.serving.workload import PRIVATE, Segment, Workload, WorkloadRequest
from tokentwin.traces.measured.run import MeasuredRun, figures
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.recording import Recording


class RecordedClient(Settings):
    """Folders with one run each. Runs of the same workload are repeats, whose differences are the noise floor."""

    format: Literal["recording"] = "recording"
    folders: tuple[str, ...] = Field(min_length=1)

    def read(self, data: Path) -> list[MeasuredRun]:
        """See `MeasuredFormat`. Lengths of prompts and answers are those counted by the server."""
        runs = [_run(client_recording(data / folder)) for folder in self.folders]
        return [replace(run, floor_pct=_floor_pct([r for r in runs if sent(r) == sent(run)])) for run in runs]


def client_recording(path: Path) -> Recording:
    """Return the recording that `bench --url` made in `path`. Raises UserError if it was simulated."""
    recording = Recording.load(path)
    if recording.run["clock"] != "wall":
        raise UserError("recording", str(path), "was simulated; give one that `tokentwin bench --url` made")
    return recording


def sent(run: MeasuredRun) -> list[tuple[int, int]]:
    """Return the ids and arrival times of a run's requests, which are equal for repeats."""
    return [(request.id, request.arrival_ns) for request in run.workload.requests]


def _run(recording: Recording) -> MeasuredRun:
    rows = {row["request_id"]: row for row in _columns(recording).to_pylist()}
    offered = recording.workload()
    requests = [_as_served(request, rows[request.id]) for request in offered.requests if request.id in rows]
    served = [request for request in requests if request is not None]
    if not any(row["status"] == "finished" for row in rows.values()):
        raise UserError("recording", str(recording.path), "has no request that finished; nothing can be compared")
    cautions = []
    if len(served) < len(rows):
        cautions.append(f"{len(rows) - len(served)} requests were refused and are left out")
    workload = replace(offered, requests=served)
    rate = _offered_per_s(workload)
    return MeasuredRun(
        recording.path.name,
        workload,
        figures(RunMetrics.from_recording(recording), rate),
        caution="; ".join(cautions),
        by_client=True,
        offered_per_s=rate,
    )


def _columns(recording: Recording) -> pa.Table:
    return recording.table("requests", ["request_id", "status", "prompt_tokens", "output_tokens", "end_ns"])


def _as_served(request: WorkloadRequest, row: Mapping[str, Any]) -> WorkloadRequest | None:
    """Return the request with its real lengths; None if no engine processed it."""
    prompt = _cut(request.prompt, row["prompt_tokens"])
    if row["status"] == "finished":
        return replace(request, prompt=prompt, output_len=row["output_tokens"])
    if row["output_tokens"]:
        return replace(request, prompt=prompt, cancel_ns=row["end_ns"])
    return None


def _cut(prompt: tuple[Segment, ...], tokens: int) -> tuple[Segment, ...]:
    """Return a prompt with the length that the server counted, by cutting it or appending private tokens."""
    kept, left = [], tokens
    for name, count in prompt:
        if left > 0:
            kept.append((name, min(count, left)))
            left -= count
    return (*kept, (PRIVATE, left)) if left > 0 else tuple(kept)


def _offered_per_s(workload: Workload) -> float | None:
    """Return the offered requests per second; None if the client waited for answers."""
    arrivals = [request.arrival_ns for request in workload.requests]
    waits = workload.concurrency is not None or any(request.think_ns is not None for request in workload.requests)
    if waits or len(arrivals) < 2 or arrivals[-1] <= arrivals[0]:
        return None
    return (len(arrivals) - 1) * 1e9 / (arrivals[-1] - arrivals[0])


def _floor_pct(repeats: Sequence[MeasuredRun]) -> dict[str, float]:
    """Return `spread_pct` of each figure; empty for a single run."""
    floors = {}
    for name in repeats[0].figures:
        floor = spread_pct([run.figures[name] for run in repeats if name in run.figures])
        if floor is not None:
            floors[name] = floor
    return floors


def spread_pct(repeats: Sequence[float]) -> float | None:
    """Return the range of repeated values in percent of their mean; None for a single value."""
    centre = mean(repeats)
    return 100 * (max(repeats) - min(repeats)) / centre if len(repeats) > 1 and centre else None
