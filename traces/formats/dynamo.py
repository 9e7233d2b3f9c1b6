"""Request traces and agent traces of NVIDIA Dynamo: JSON lines, a row for each request that ended and each tool call.

https://github.com/ai-dynamo/dynamo, docs/agents/agent-tracing.md, schemas `dynamo.request.trace.v1` and
`dynamo.agent.trace.v1`; a sink may wrap a row in `{"timestamp", "event"}`. The session of a request is the narrowest
that is stated: trajectory, program or session. `replay` has the prompt's length and a rolling hash for each of its
blocks, so shared prefixes are exact. Without it, a turn is assumed to extend the previous one. The gap to the next
request contains the tools' time, so rows of tools are not needed. Subagents begin at their recorded times.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload
from tokentwin.traces.distributions import LONGEST
from tokentwin.traces.formats.rows import Row, json_rows
from tokentwin.traces.formats.sessions import Assumed, Call, Turn, recorded_sessions, workload_of_sessions

_MS_NS = 1_000_000
_SESSIONS = ("trajectory_id", "program_id", "session_id", "workflow_id")  # the narrowest first
_MOST_BLOCK = 1 << 20


def read(path: Path, assumed: Assumed) -> Workload:
    """Return the workload of a file. See `SessionTraceReader`."""
    calls, empty, sizes = [], 0, set[int]()
    for row in json_rows(path):
        event = _inside(row, row.fields, "event") if "event" in row.fields else row.fields
        if event.get("event_type") != "request_end":
            continue
        call, block_tokens = _call(row, event)
        if call is None:
            empty += 1
            continue
        calls.append(call)
        sizes |= {block_tokens} if block_tokens else set()
        if len(sizes) > 1:
            raise row.error("trace_block_size", block_tokens, f"must be {min(sizes - {block_tokens})} everywhere")
    if sizes and any(call.turn.keys is None for call in calls):
        raise UserError("trace", str(path), "has hashes of only some prompts; keep rows with `replay`, or without")
    sessions, cautions = recorded_sessions(calls)
    if empty:
        cautions.append(f"{empty} requests without an answer are left out")
    return workload_of_sessions(path, sessions, assumed, max(sizes, default=1), cautions)


def _call(row: Row, event: Mapping[str, Any]) -> tuple[Call | None, int]:
    """Return the call, None if it has no answer, and the tokens of a block of its hashes, 0 if it has none."""
    context = Row(row.path, row.line, _inside(row, event, "agent_context", absent={}), typed=True)
    session = next(filter(None, (context.text(name) for name in _SESSIONS)), "")
    request = Row(row.path, row.line, _inside(row, event, "request"), typed=True)
    if not request.integer("output_tokens", 0, default=0, most=LONGEST):
        return None, 0
    output = request.tokens("output_tokens")
    begins_ns, ends_ns = _times(Row(row.path, row.line, event, typed=True), request)
    if "replay" not in request.fields:
        return Call(begins_ns, ends_ns, session, Turn(output, request.tokens("input_tokens"))), 0
    replay = Row(row.path, row.line, _inside(row, request.fields, "replay"), typed=True)
    block_tokens = replay.integer("trace_block_size", 1, most=_MOST_BLOCK)
    prompt, hashes = replay.tokens("input_length"), replay.items("input_sequence_hashes")
    if len(hashes) not in (whole := prompt // block_tokens, -(-prompt // block_tokens)):
        remedy = f"must have {whole} or {-(-prompt // block_tokens)} entries for input_length {prompt}"
        raise row.error("input_sequence_hashes", f"{len(hashes)} hashes", remedy)
    if any(isinstance(value, bool) or not isinstance(value, int) for value in hashes):
        raise row.error("input_sequence_hashes", hashes[:1], "must hold whole numbers only")
    return Call(begins_ns, ends_ns, session, Turn(output, prompt, keys=tuple(hashes))), block_tokens


def _times(event: Row, request: Row) -> tuple[int, int]:
    """Return the begin and the end of a request in nanoseconds, one of them perhaps from the other and the duration."""
    took_ns = request.time_ns("total_time_ms", _MS_NS) if "total_time_ms" in request.fields else None
    if "request_received_ms" in request.fields:
        begins_ns = request.time_ns("request_received_ms", _MS_NS)
        ends_ns = event.time_ns("event_time_unix_ms", _MS_NS) if took_ns is None else begins_ns + took_ns
    else:
        ends_ns = event.time_ns("event_time_unix_ms", _MS_NS)
        begins_ns = ends_ns - (took_ns or 0)
    if ends_ns < begins_ns:
        raise event.error("event_time_unix_ms", ends_ns // _MS_NS, "must not be before request_received_ms")
    return begins_ns, ends_ns


def _inside(row: Row, holder: Mapping[str, Any], field: str, absent: Any = None) -> Mapping[str, Any]:
    value = holder.get(field, absent)
    if not isinstance(value, dict):
        raise row.error(field, value, "must be an object")
    return value
