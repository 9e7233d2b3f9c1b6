"""Inputs of NVIDIA's AIPerf: conversations as JSON lines (`multi_turn`), and the file `inputs.json` of a run.

https://github.com/ai-dynamo/aiperf, docs/tutorials/multi-turn.md and working-with-profile-exports.md. A turn has
`text` or `texts`, and perhaps `delay` or `timestamp` (ms) and `output_length`. It adds its text to the conversation, in
which the answers are those of the run. A payload of `inputs.json` is a request body; if its messages begin with those
of the payload before, it is a whole conversation, otherwise it adds to it. A stated limit of the answer counts as its
length, because AIPerf asks for answers of exactly that length where it can.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokentwin.serving.workload import Workload
from tokentwin.traces.distributions import LONGEST
from tokentwin.traces.formats.conversation_text import BLOCK_TOKENS, ConversationText, Encode, content_text, encoder
from tokentwin.traces.formats.rows import Row, json_objects
from tokentwin.traces.formats.sessions import Assumed, Session, Turn, workload_of_sessions

_MS_NS = 1_000_000
_MEDIA = ("image", "images", "audio", "audios", "video", "videos")
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


def read(path: Path, assumed: Assumed) -> Workload:
    """Return the workload of a file. See `SessionTraceReader`."""
    encode, cautions = encoder(assumed)
    stated: list[list[Turn]] = []
    conversations: dict[str, list[Row]] = {}  # several lines may add turns to one conversation
    for number, row in enumerate(json_objects(path)):
        if "data" in row.fields:
            stated += [_payloads(_inner(row, "data", entry), encode) for entry in row.items("data")]
        else:
            turns = conversations.setdefault(row.text("session_id") or f" {number}", [])
            turns += [_inner(row, "turns", item) for item in row.items("turns")]
    stated += [_turns(turns, encode) for turns in conversations.values()]
    sessions = [Session(f"c{number}", turns) for number, turns in enumerate(filter(None, stated))]
    return workload_of_sessions(path, sessions, assumed, BLOCK_TOKENS, cautions)


def _turns(rows: Sequence[Row], encode: Encode) -> list[Turn]:
    turns: list[Turn] = []
    said, first = ConversationText(encode), True
    for turn in rows:
        if media := next((name for name in _MEDIA if turn.fields.get(name)), None):
            raise turn.error(media, "a file", "is not supported; only text is")
        tokens = said.add(_text(turn))
        if turn.fields.get("role") == "system" and first:
            continue
        if not said.length or (not first and not tokens):
            raise turn.error("text", None, "is missing; add it")
        output = turn.tokens("output_length") if turn.fields.get("output_length") is not None else None
        delay_ns, at_ns = _ns(turn, "delay"), _ns(turn, "timestamp")
        if first:
            turns.append(said.turn(output, at_ns))
        else:
            turns.append(Turn(output, added=tokens, arrival_ns=at_ns, think_ns=delay_ns))
        first = False
    return turns


def _payloads(row: Row, encode: Encode) -> list[Turn]:
    turns: list[Turn] = []
    said: list[Any] = []
    for item in row.items("payloads"):
        payload = _inner(row, "payloads", item)
        messages = payload.items("messages") if "messages" in payload.fields else [{"content": payload.text("prompt")}]
        text = ConversationText(encode)
        if tools := payload.fields.get("tools"):
            text.add(json.dumps(tools, default=str))
        own = text.length  # the definitions of tools
        for message in messages:
            text.add(content_text(payload, "messages", _inner(payload, "messages", message).fields.get("content")))
        if text.length == own:
            raise payload.error("messages", None, "must have a text")
        limits = (name for name in _LIMITS if payload.fields.get(name) is not None)
        limit = next(limits, None)
        output = payload.integer(limit, 1, most=LONGEST) if limit else None
        whole = not turns or messages[: len(said)] == said
        turns.append(text.turn(output) if whole else Turn(output, added=text.length - own))
        said = messages
    return turns


def _inner(row: Row, field: str, item: Any) -> Row:
    if not isinstance(item, Mapping):
        raise row.error(field, item, "must hold objects")
    return Row(row.path, row.line, item, typed=True)


def _text(turn: Row) -> str:
    """Return the text of a turn: `text`, or all of `texts`, which are strings or `{"contents": [...]}`."""
    if "text" in turn.fields or "texts" not in turn.fields:
        return content_text(turn, "text", turn.fields.get("text"))
    texts: list[str] = []
    for item in turn.items("texts"):
        contents = item.get("contents") if isinstance(item, Mapping) else item
        parts = contents if isinstance(contents, list) else [contents]
        texts += [content_text(turn, "texts", text) for text in parts]
    return "\n".join(texts)


def _ns(turn: Row, field: str) -> int | None:
    return None if turn.fields.get(field) is None else turn.time_ns(field, _MS_NS)
