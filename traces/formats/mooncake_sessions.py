"""Mooncake traces with sessions: the rows of `mooncake`, and `session_id`, `delay` and other fields for agents.

AIPerf (docs/benchmark-modes/trace-replay.md) and Dynamo's replay (docs/benchmarks, `mooncake` and `agentic_mooncake`)
read them. A later turn comes `delay` and `tool_wait_ms` after the answer to the turn before, or at its `timestamp` if
it has no delay; all times are milliseconds. With `hash_ids`, a row is a whole prompt, as in Mooncake's and Dynamo's
traces. Without them, `input_length` is what the turn adds to the conversation, as in AIPerf's. A session that waits for
another one (`wait_for`) begins at its timestamp.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokentwin.serving.workload import Workload
from tokentwin.traces.formats.rows import Row, json_rows
from tokentwin.traces.formats.sessions import Assumed, Session, Turn, workload_of_sessions

_MS_NS = 1_000_000
_USED = ("session_id", "timestamp", "delay", "delay_ms", "tool_wait_ms", "input_length", "output_length", "hash_ids")
_PASSED_OVER = (
    *("type", "request_id", "wait_for", "branches", "prefix_reset", "tool_events", "priority", "strict_priority"),
    *("policy_class", "parent_session_id", "request_kind", "extra"),
)
_BLOCKS = (512, 256, 128, 64, 32, 16)  # tokens of a block, as traces in use have them


def read(path: Path, assumed: Assumed) -> Workload:
    """Return the workload of a file. See `SessionTraceReader`."""
    sessions: dict[str, Session] = {}
    hashed: list[tuple[Row, Turn]] = []
    waiting = 0
    for number, row in enumerate(json_rows(path, *_USED, *_PASSED_OVER)):
        name = row.text("session_id")
        session = sessions.setdefault(name or f" {number}", Session(name, []))
        turn = _turn(row, first=not session.turns)
        waiting += not session.turns and bool(row.fields.get("wait_for"))
        session.turns.append(turn)
        if turn.keys is not None:
            hashed.append((row, turn))
    cautions = [f"{waiting} sessions wait for others; each begins at its timestamp"] if waiting else []
    return workload_of_sessions(path, list(sessions.values()), assumed, _block_tokens(hashed), cautions)


def _turn(row: Row, first: bool) -> Turn:
    output, length = row.tokens("output_length"), row.tokens("input_length")
    waits = [row.time_ns(name, _MS_NS) for name in ("delay", "delay_ms", "tool_wait_ms") if name in row.fields]
    at_ns = row.time_ns("timestamp", _MS_NS) if "timestamp" in row.fields else None
    if first:
        at_ns = at_ns if at_ns is None else at_ns + sum(waits)
        think_ns = None
    elif waits:
        at_ns, think_ns = None, sum(waits)
    else:
        think_ns = None
    if "hash_ids" not in row.fields:
        return Turn(output, added=length, arrival_ns=at_ns, think_ns=think_ns)
    ids = row.items("hash_ids")
    for id_ in ids:
        if isinstance(id_, bool) or not isinstance(id_, int):
            raise row.error("hash_ids", id_, "must hold whole numbers only")
    return Turn(output, length, arrival_ns=at_ns, think_ns=think_ns, keys=tuple(ids))


def _block_tokens(rows: Sequence[tuple[Row, Turn]]) -> int:
    """Return the tokens of a block, which a file does not state: the largest usual size that fits every row.

    Raises UserError about a row that fits none.
    """
    fitting = list(_BLOCKS)
    for row, turn in rows:
        assert turn.keys is not None and turn.prompt is not None
        fitting = [tokens for tokens in fitting if len(turn.keys) == -(-turn.prompt // tokens)]
        if not fitting:
            sizes = ", ".join(map(str, _BLOCKS))
            remedy = f"must have an entry for each block of input_length {turn.prompt}; blocks have {sizes} tokens"
            raise row.error("hash_ids", f"{len(turn.keys)} ids", f"{remedy}, the same in all rows")
    return max(fitting)
