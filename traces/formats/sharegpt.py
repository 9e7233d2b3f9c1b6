"""Conversations in ShareGPT's format, or as messages of OpenAI's chat API: a JSON array, or JSON lines.

https://huggingface.co/datasets/anon8231489123/ShareGPT_Vicuna_unfiltered: `conversations` is a list of `{"from":
"human", "value": text}`. A message of OpenAI's has `role` and `content`, in `messages`. Each answer is a turn whose
prompt is all that was said before. ShareGPT has no times; if messages have a `timestamp` or `create_time` (ISO 8601, or
seconds), they are arrivals and think times. Otherwise `Assumed` gives both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tokentwin.serving.workload import Workload
from tokentwin.traces.formats.conversation_text import BLOCK_TOKENS, ConversationText, Encode, content_text, encoder
from tokentwin.traces.formats.rows import Row, json_objects
from tokentwin.traces.formats.sessions import Assumed, Session, Turn, workload_of_sessions

_LISTS, _SPEAKERS, _TEXTS = ("conversations", "messages"), ("from", "role"), ("value", "content")
_TIMES = ("timestamp", "create_time")
_ANSWERS = {"gpt", "chatgpt", "assistant", "model", "bing", "bard", "claude", "function_call"}
_SECOND_NS = 1_000_000_000


def read(path: Path, assumed: Assumed) -> Workload:
    """Return the workload of a file. See `SessionTraceReader`."""
    encode, cautions = encoder(assumed)
    sessions: list[Session] = []
    for row in json_objects(path):
        if turns := _turns(row, encode):
            sessions.append(Session(f"c{len(sessions)}", turns))
    return workload_of_sessions(path, _from_the_first(sessions), assumed, BLOCK_TOKENS, cautions)


class _Message(NamedTuple):
    answers: bool
    text: str
    at_ns: int | None


def _turns(row: Row, encode: Encode) -> list[Turn]:
    said = ConversationText(encode)
    turns: list[Turn] = []
    asked_ns, answered_ns, answering = _time_ns(row), None, True
    for message in _messages(row):
        if not message.answers:
            said.add(message.text)
            asked_ns, answering = message.at_ns if message.at_ns is not None else asked_ns, False
            continue
        asked, tokens = said.length, 0
        turn = said.turn(None)
        tokens = said.add(message.text)
        if answering and turns:  # an answer in several messages
            turns[-1] = replace(turns[-1], output=(turns[-1].output or 0) + tokens)
        elif asked and tokens:
            turns.append(_timed(replace(turn, output=tokens), turns, asked_ns, answered_ns))
        answering, asked_ns, answered_ns = True, None, message.at_ns
    return turns


def _timed(turn: Turn, before: list[Turn], asked_ns: int | None, answered_ns: int | None) -> Turn:
    """Return the turn with its arrival, or with the think time since the answer before, as far as they are stated."""
    if before and asked_ns is not None and answered_ns is not None:
        return replace(turn, think_ns=max(asked_ns - answered_ns, 0))
    return replace(turn, arrival_ns=asked_ns)


def _messages(row: Row) -> Iterator[_Message]:
    name = next((name for name in _LISTS if name in row.fields), _LISTS[0])
    for item in row.items(name):
        if not isinstance(item, dict):
            raise row.error(name, item, "must hold objects with from and value, or role and content")
        message = Row(row.path, row.line, item, typed=True)
        speaker, content = (next((n for n in names if n in item), names[0]) for names in (_SPEAKERS, _TEXTS))
        answers = message.text(speaker).lower() in _ANSWERS
        yield _Message(answers, content_text(message, content, item.get(content)), _time_ns(message))


def _time_ns(row: Row) -> int | None:
    """Return the time of a message or conversation in nanoseconds since 1970; None if it has none."""
    field = next((name for name in _TIMES if row.fields.get(name) not in (None, "")), None)
    if field is None:
        return None
    return row.instant_ns(field) if isinstance(row.fields[field], str) else row.time_ns(field, _SECOND_NS)


def _from_the_first(sessions: list[Session]) -> list[Session]:
    """Return the sessions with times since the first arrival of all."""
    stated = [turn.arrival_ns for session in sessions for turn in session.turns if turn.arrival_ns is not None]
    first_ns = min(stated, default=0)

    def moved(turn: Turn) -> Turn:
        return turn if turn.arrival_ns is None else replace(turn, arrival_ns=turn.arrival_ns - first_ns)

    return [Session(session.name, [moved(turn) for turn in session.turns]) for session in sessions]
