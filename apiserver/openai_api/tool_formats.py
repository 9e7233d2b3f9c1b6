"""The formats in which models write tool calls when they choose to, and a reader of answers in such a format.

The formats have the names of vLLM's parsers. The reader passes text on as soon as it cannot be part of a call, and a
call when it is complete. What begins like a call, but is none, stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Schemas = Mapping[str, Mapping[str, Any]]
"""The schema of each tool's parameters, by the tool's name."""


class ToolCall(NamedTuple):
    """A call of a tool; `arguments` is a JSON object as text."""

    name: str
    arguments: str


Calls = tuple[list[ToolCall], int]
"""Calls, and the number of characters that they take."""


class Format(NamedTuple):
    """A format of tool calls.

    Attributes:
        begins: texts with which calls begin; with `at_start`, only where an answer begins
        read: return the calls at the beginning of a text, which is `over` if no more of it comes; None if they are not
            complete yet. Raises ValueError if the text is no call
        at_start: see `begins`
    """

    begins: tuple[str, ...]
    read: Callable[[str, Schemas, bool], Calls | None]
    at_start: bool = False


def _call(call: Any, *names: str) -> ToolCall:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError("no call")
    arguments: Any = next((call[name] for name in names if name in call), {})
    return ToolCall(call["name"], arguments if isinstance(arguments, str) else _written(arguments))


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _value(text: str, start: int, over: bool) -> tuple[Any, int] | None:
    """Return the JSON value in `text` from `start` on, and its end; None while it is incomplete."""
    start += len(text[start:]) - len(text[start:].lstrip())
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except ValueError:
        if over:
            raise
        return None
    return value, end


def _hermes(text: str, schemas: Schemas, over: bool) -> Calls | None:
    """Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    end = text.find("</tool_call>")
    if end < 0 and not over:
        return None
    inside = text[len("<tool_call>") : end if end >= 0 else len(text)]
    call = _call(json.loads(inside), "arguments", "parameters")
    return [call], end + len("</tool_call>") if end >= 0 else len(text)


def _qwen3_coder(text: str, schemas: Schemas, over: bool) -> Calls | None:
    """Read `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`."""
    end = text.find("</tool_call>")
    if end < 0 and not over:
        return None
    match = re.search(r"<function=([^>]+)>(.*)</function>", text[: end if end >= 0 else len(text)], re.DOTALL)
    if match is None:
        raise ValueError("no call")
    properties = schemas.get(match[1], {}).get("properties")
    types = properties if isinstance(properties, dict) else {}
    written = re.findall(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", match[2], re.DOTALL)
    arguments = {name: _typed(value, types.get(name)) for name, value in written}
    return [ToolCall(match[1], _written(arguments))], end + len("</tool_call>") if end >= 0 else len(text)


def _typed(value: str, schema: Any) -> Any:
    """Return the value of a parameter; it is a text unless its schema names another type."""
    if not isinstance(schema, dict) or schema.get("type", "string") == "string":
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _llama3_json(text: str, schemas: Schemas, over: bool) -> Calls | None:
    """Read `{"name": ..., "parameters": {...}}`, after `<|python_tag|>` if it is there; `;` separates calls."""
    read = _value(text, len("<|python_tag|>") if text.startswith("<|python_tag|>") else 0, over)
    if read is None:
        return None
    call = _call(read[0], "parameters", "arguments")
    if call.name not in schemas and not read[0].keys() & {"parameters", "arguments"}:
        raise ValueError("an answer in JSON, and no call")
    return [call], read[1]


def _mistral(text: str, schemas: Schemas, over: bool) -> Calls | None:
    """Read `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]` or, of newer models, `[TOOL_CALLS]NAME{...}`."""
    begin = len("[TOOL_CALLS]")
    named = re.match(r"\s*([\w.-]+)(\[ARGS\])?(?=\s*\{)", text[begin:])
    if named is None and not over and not text[begin:].lstrip().startswith("["):
        return None
    read = _value(text, begin + (named.end() if named else 0), over)
    if read is None:
        return None
    value, end = read
    if named is not None:
        return [ToolCall(named[1], _written(value))], end
    if not isinstance(value, list):
        raise ValueError("no calls")
    return [_call(call, "arguments", "parameters") for call in value], end


FORMATS: dict[str, Format] = {
    "hermes": Format(("<tool_call>",), _hermes),
    "llama3_json": Format(("<|python_tag|>", "{"), _llama3_json, at_start=True),
    "mistral": Format(("[TOOL_CALLS]",), _mistral),
    "qwen3_coder": Format(("<tool_call>",), _qwen3_coder),
}


def format_of(template: str) -> str:
    """Return the name of the format that a chat template teaches its model; empty if it is none of these."""
    if "<tool_call>" in template:
        return "qwen3_coder" if "<function=" in template else "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    return "llama3_json" if "<|python_tag|>" in template or '"parameters":' in template else ""


class CallReader:
    """A reader of one answer, piece by piece."""

    def __init__(self, name: str, schemas: Schemas) -> None:
        self._format = FORMATS[name]
        self._schemas = schemas
        self._pending = ""  # text that may be part of a call
        self._at_start = True
        self._after_call = False  # then space and `;` are no text

    def push(self, text: str, over: bool) -> tuple[str, list[ToolCall]]:
        """Take the next text, the last one if `over`; return the text that is no call, and the calls complete now."""
        self._pending += text
        said, calls = "", []
        while self._pending:
            if self._after_call:
                self._pending = self._pending.lstrip(" \n;")
            begins = self._begin()
            said, self._pending = said + self._pending[:begins], self._pending[begins:]
            self._at_start = self._at_start and not said.strip()
            self._after_call = self._after_call and not said
            if not any(map(self._pending.startswith, self._format.begins)):  # perhaps the beginning of such a text
                break
            try:
                calls_read = self._format.read(self._pending, self._schemas, over)
            except (ValueError, RecursionError):  # also a value that is nested too deeply
                self._at_start = False
                said, self._pending = said + self._pending[0], self._pending[1:]
                continue
            if calls_read is None:
                break
            calls += calls_read[0]
            self._pending, self._after_call = self._pending[calls_read[1] :], True
        if over:
            said, self._pending = said + self._pending, ""
        return said, calls

    def _begin(self) -> int:
        """Return the place in the pending text where a call may begin; its end if there is none."""
        length = len(self._pending)
        if self._format.at_start:
            spaces = length - len(self._pending.lstrip())
            rest = self._pending[spaces:]
            may = any(rest.startswith(one) or one.startswith(rest) for one in self._format.begins)
            return spaces if self._at_start and may else length
        whole = [at for one in self._format.begins if (at := self._pending.find(one)) >= 0]
        partial = [
            at
            for one in self._format.begins
            for at in range(max(length - len(one) + 1, 0), length)
            if one.startswith(self._pending[at:])
        ]
        return min([*whole, *partial, length])
