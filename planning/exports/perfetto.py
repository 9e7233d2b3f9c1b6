"""A recording as a trace for ui.perfetto.dev and chrome://tracing: the work of every replica, and every request.

The Trace Event Format (JSON): a replica is a process, its steps are slices of a thread, its queue, batch and KV usage
are counters, and a request is an asynchronous slice with its phases inside. Times are microseconds with three decimals,
so that no nanosecond is lost.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any

import pyarrow as pa

from tokentwin.planning.exports.recorded_run import RecordedRun
from tokentwin.traces.recording import Recording

Event = dict[str, Any]

_STEP_COLUMNS = [
    "replica", "step", "start_ns", "end_ns", "prefill_rows", "prefill_tokens", "decode_rows", "running", "waiting",
    "used_blocks", "preempted",
]  # fmt: skip
_REQUEST_COLUMNS = [
    "request_id", "replica", "status", "arrival_ns", "scheduled_ns", "first_token_ns", "finish_ns", "end_ns",
    "prompt_tokens", "output_tokens", "prefix_hit_tokens", "preemptions",
]  # fmt: skip
_ARGUMENTS = ("request_id", "status", "prompt_tokens", "output_tokens", "prefix_hit_tokens", "preemptions")
_PHASES = (("queue", "arrival_ns"), ("prefill", "scheduled_ns"), ("decode", "first_token_ns"))
_PIECE = 20_000
_NOBODY = 1  # process of requests that reached no replica; process 0 is the idle process of a kernel trace


def write_perfetto(source: RecordedRun, out: IO[bytes]) -> None:
    """Write all events, one on each line."""
    recording = source.recording
    run = recording.run
    other = {name: run[name] for name in ("run_id", "clock", "workload", "version", "seed")}
    out.write(b'{"displayTimeUnit":"ms","otherData":' + _json(other) + b',"traceEvents":[\n')
    first = True
    for event in events(recording):
        out.write((b"" if first else b",\n") + _json(event))
        first = False
    out.write(b"\n]}\n")


def events(recording: Recording) -> Iterator[Event]:
    """Yield the trace events of a recording: names of processes and threads, then steps, then requests."""
    steps = recording.table("steps", _STEP_COLUMNS).sort_by([("replica", "ascending"), ("start_ns", "ascending")])
    requests = recording.table("requests", _REQUEST_COLUMNS)
    replicas = sorted({*steps["replica"].unique().to_pylist(), *requests["replica"].unique().to_pylist()} - {None})
    for replica in replicas:
        yield _named(_process(replica), "process_name", f"replica {replica}")
    if requests["replica"].null_count:
        yield _named(_NOBODY, "process_name", "no replica")
    yield from _steps(steps, recording.run["num_blocks"])
    yield from _requests(requests)


def _steps(steps: pa.Table, num_blocks: int | None) -> Iterator[Event]:
    """Yield a slice for each step, and counters where their values change.

    A step that begins before the previous step ends goes to a second thread, since slices of a thread must nest.
    """
    replica, ends = None, [0, 0]
    shown: dict[str, float] = {}
    for row in _rows(steps):
        if row["replica"] != replica:
            replica, ends, shown = row["replica"], [0, 0], {}
        lane = 0 if row["start_ns"] >= ends[0] else 1
        ends[lane] = max(ends[lane], row["end_ns"])
        common = {"pid": _process(row["replica"]), "ts": _us(row["start_ns"])}
        yield {
            **common,
            "ph": "X",
            "cat": "step",
            "name": _kind(row),
            "tid": 1 + lane,
            "dur": _us(row["end_ns"] - row["start_ns"]),
            "args": {
                name: row[name] for name in ("step", "prefill_rows", "prefill_tokens", "decode_rows", "preempted")
            },
        }
        counters = {"waiting (requests)": row["waiting"], "running (requests)": row["running"]}
        if num_blocks and row["used_blocks"] is not None:
            counters["KV usage (%)"] = round(100 * row["used_blocks"] / num_blocks, 3)
        for name, value in counters.items():
            if value is not None and shown.get(name) != value:
                shown[name] = value
                yield {**common, "ph": "C", "name": name, "args": {"value": value}}


def _requests(requests: pa.Table) -> Iterator[Event]:
    """Yield a slice for each request from its intended arrival to its end, and in it the phases that it reached.

    All slices of requests have the same name, since viewers give every name of an asynchronous slice a separate track.
    """
    for row in _rows(requests):
        ends = [row["finish_ns"], row["end_ns"], row["first_token_ns"], row["scheduled_ns"], row["arrival_ns"]]
        end = next((time_ns for time_ns in ends if time_ns is not None), None)
        if end is None or row["arrival_ns"] is None:
            continue
        pid = _NOBODY if row["replica"] is None else _process(row["replica"])
        common = {"pid": pid, "tid": 1, "cat": "request", "id": row["request_id"]}
        arguments = {name: row[name] for name in _ARGUMENTS if row[name] is not None}
        yield {**common, "ph": "b", "name": "request", "ts": _us(row["arrival_ns"]), "args": arguments}
        reached = [(phase, row[begin]) for phase, begin in _PHASES if row[begin] is not None]
        for (phase, begin), until in zip(reached, [*(time_ns for _, time_ns in reached[1:]), end], strict=True):
            yield {**common, "ph": "b", "name": phase, "ts": _us(begin)}
            yield {**common, "ph": "e", "name": phase, "ts": _us(max(until, begin))}
        yield {**common, "ph": "e", "name": "request", "ts": _us(end)}


def _rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield rows as dictionaries. The table is converted in pieces, because it may be too large for the memory."""
    for batch in table.to_batches(max_chunksize=_PIECE):
        yield from batch.to_pylist()


def _kind(step: dict[str, Any]) -> str:
    if not step["prefill_rows"]:
        return "decode"
    return "mixed" if step["decode_rows"] else "prefill"


def _process(replica: int) -> int:
    return replica + 2


def _named(pid: int, what: str, name: str) -> Event:
    return {"ph": "M", "pid": pid, "name": what, "args": {"name": name}}


def _us(ns: int) -> float:
    return ns / 1000


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
