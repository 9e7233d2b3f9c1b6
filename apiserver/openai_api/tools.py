"""The tool calls of a chat: the JSON schema of those that it must make, and the form in which the client gets them.

As in vLLM, if `tool_choice` names a tool, the model writes only its arguments. If any tool must be called, the model
writes a list of names and parameters. With `tool_choice` `auto` the model writes calls in its own format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal
from uuid import uuid4

from tokentwin.apiserver.openai_api.limited import Limited
from tokentwin.apiserver.openai_api.tool_formats import CallReader, Schemas
from tokentwin.realengine.grammar import ANY_OBJECT


class _Name(Limited):
    name: str


class NamedTool(Limited):
    """The tool that must be called."""

    type: Literal["function"] = "function"
    function: _Name


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def parameters_of(tools: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the schema of each tool's parameters, by the tool's name. Raises ValueError for an invalid tool."""
    schemas = {}
    for tool in tools:
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("must each have a function with a name")
        schema = function.get("parameters") or ANY_OBJECT
        if not isinstance(schema, dict):
            raise ValueError("must have parameters that are a JSON schema")
        schemas[function["name"]] = schema
    return schemas


def call_schema(parameters: dict[str, dict[str, Any]], name: str | None, at_most_one: bool) -> dict[str, Any]:
    """Return the JSON schema of an answer that calls the tool `name`, or any tool if `name` is None."""
    if name is not None:
        return parameters[name]
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool}, "parameters": schema},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool, schema in parameters.items()
    ]
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **_most(at_most_one)}


def _most(at_most_one: bool) -> dict[str, int]:
    return {"maxItems": 1} if at_most_one else {}


@dataclass(slots=True)
class Calls:
    """The tool calls in the choices of one answer: of the tool `name`, or of any tool if `name` is None.

    A stream sends calls of any tool only at its end.
    """

    name: str | None
    _texts: dict[int, str] = field(default_factory=dict, init=False)

    def finish(self, index: int, finish: str | None) -> str | None:
        """Return OpenAI's finish reason; it is `tool_calls` only if the model has chosen the tool."""
        return "tool_calls" if finish == "stop" and self.name is None else finish

    def message(self, index: int, text: str) -> dict[str, Any]:
        """Return the fields of a message for `text`: its tool calls, or content if the text is incomplete."""
        calls = self._calls(text)
        return {"content": None, "tool_calls": calls} if calls else {"content": text}

    def delta(self, index: int, text: str, ends: bool) -> dict[str, Any]:
        """Return the fields that a stream's delta has instead of `text` in choice `index`."""
        known = self._texts.get(index)
        self._texts[index] = (known or "") + text
        if self.name is None:
            message = self.message(index, self._texts[index]) if ends else {}
            calls = [{"index": at, **call} for at, call in enumerate(message.get("tool_calls", ()))]
            return {"tool_calls": calls} if calls else {"content": message.get("content") or ""}
        call = _call(self.name, text) if known is None else {"function": {"arguments": text}}
        return {"tool_calls": [{"index": 0, **call}]}

    def _calls(self, text: str) -> list[dict[str, Any]]:
        if self.name is not None:
            return [_call(self.name, text)]
        try:
            written = json.loads(text)
        except (ValueError, RecursionError):
            return []
        return [_call(one["name"], json.dumps(one["parameters"], ensure_ascii=False)) for one in written]


class ChosenCalls:
    """The tool calls that the model has chosen to make in the choices of one answer, written in the format `name`.

    `count` is called for each text that is read, with vLLM's names of the mode and of the outcome.
    """

    def __init__(self, name: str, schemas: Schemas, count: Callable[[str, str], None] = lambda *labels: None) -> None:
        self._new = partial(CallReader, name, schemas)
        self._count = count
        self._readers: dict[int, CallReader] = {}
        self._calls: dict[int, int] = {}  # number of calls so far, by choice

    def finish(self, index: int, finish: str | None) -> str | None:
        """Return OpenAI's finish reason."""
        return "tool_calls" if finish == "stop" and self._calls.get(index) else finish

    def message(self, index: int, text: str) -> dict[str, Any]:
        """Return the fields of a message for the whole text of choice `index`."""
        said, calls = self._read(index, text, True, "non_streaming")
        return {"content": said or None, "tool_calls": calls} if calls else {"content": said}

    def delta(self, index: int, text: str, ends: bool) -> dict[str, Any]:
        """Return the fields that a stream's delta has instead of `text` in choice `index`."""
        first = self._calls.get(index, 0)
        said, calls = self._read(index, text, ends, "streaming")
        numbered = [{"index": at, **call} for at, call in enumerate(calls, first)]
        return {**({"content": said} if said else {}), **({"tool_calls": numbered} if calls else {})}

    def _read(self, index: int, text: str, ends: bool, mode: str) -> tuple[str, list[dict[str, Any]]]:
        reader = self._readers.setdefault(index, self._new())
        said, calls = reader.push(text, ends)
        self._count(mode, "tool_call" if calls else "no_tool_call")
        self._calls[index] = self._calls.get(index, 0) + len(calls)
        return said, [_call(*call) for call in calls]


def _call(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"chatcmpl-tool-{uuid4().hex}", "type": "function", "function": function}
