"""`POST /v1/messages`, Anthropic's Messages API: a chat in another form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictBool

from tokentwin.apiserver.openai_api.answers import ChatStyle, Piece, Usage
from tokentwin.apiserver.openai_api.block_stream import BlockStream
from tokentwin.apiserver.openai_api.limited import Limited
from tokentwin.apiserver.openai_api.protocol import MOST_MESSAGES, MOST_TOOLS, Label, neutral
from tokentwin.apiserver.openai_api.refusal import Refusal

_ENDS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class _CacheControl(Limited):
    type: Literal["ephemeral"]  # every prefix is cached here
    ttl: Label | None = None


class _Block(Limited):
    """A block of a message; each type has its own fields."""

    type: Literal["text", "tool_use", "tool_result"]
    text: str | None = None
    id: Label | None = None
    name: Label | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Label | None = None
    content: str | list[dict[str, Any]] | None = None
    is_error: StrictBool | None = None
    cache_control: _CacheControl | None = None
    citations: neutral(None, []) = None  # type: ignore[valid-type]


_Blocks = Annotated[list[_Block], Field(max_length=MOST_MESSAGES, fail_fast=True)]


class _Message(Limited):
    role: Literal["user", "assistant", "system"]
    content: str | _Blocks


class _Tool(Limited):
    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: StrictBool | None = None
    cache_control: _CacheControl | None = None


class _ToolChoice(Limited):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: StrictBool = False


class _Metadata(Limited):
    user_id: Label | None = None


class _Prompt(Limited):
    names: ClassVar = {"max_completion_tokens": "max_tokens", "stop": "stop_sequences", "user": "metadata.user_id"}
    model: Label
    messages: Annotated[list[_Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    system: str | _Blocks | None = None
    tools: Annotated[list[_Tool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: neutral(None, {"type": "disabled"}) = None  # type: ignore[valid-type]

    def as_chat(self) -> dict[str, Any]:
        """Return the body of a chat that asks the same. Raises Refusal for a block that a chat cannot have."""
        messages = [] if self.system is None else [{"role": "system", "content": _text_of(self.system, "system")}]
        for at, message in enumerate(self.messages):
            messages += _messages_of(message, f"messages.{at}.content")
        chat: dict[str, Any] = {"model": self.model, "messages": messages}
        if self.tools:
            chat["tools"] = [
                {
                    "type": "function",
                    "function": {
                        "name": one.name,
                        "description": one.description or "",
                        "parameters": one.input_schema,
                    },
                }
                for one in self.tools
            ]
        if (choice := self.tool_choice) is not None:
            chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use
            named = {"type": "function", "function": {"name": choice.name or ""}}
            chat["tool_choice"] = (
                named if choice.type == "tool" else "required" if choice.type == "any" else choice.type
            )
        return chat


class MessagesRequest(_Prompt):
    """The body of the request."""

    max_tokens: Annotated[int, Field(strict=True, ge=1)]
    stream: StrictBool | None = False
    stop_sequences: list[str] | None = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    metadata: _Metadata | None = None
    service_tier: Label | None = None
    cache_control: _CacheControl | None = None
    container: neutral(None) = None  # type: ignore[valid-type]
    context_management: neutral(None) = None  # type: ignore[valid-type]
    mcp_servers: neutral(None, []) = None  # type: ignore[valid-type]

    def as_chat(self) -> dict[str, Any]:
        chat = {**super().as_chat(), "max_completion_tokens": self.max_tokens, "stream": self.stream}
        given = {"stop": self.stop_sequences, "user": self.metadata and self.metadata.user_id}
        given |= {name: getattr(self, name) for name in ("temperature", "top_p", "top_k")}
        return chat | {name: value for name, value in given.items() if value is not None}


class CountRequest(_Prompt):
    """The body of `POST /v1/messages/count_tokens`."""


def _text_of(content: str | Sequence[_Block], field: str) -> str:
    if isinstance(content, str):
        return content
    if any(block.type != "text" or block.text is None for block in content):
        raise Refusal(400, f"{field} must be text, or blocks of text", field)
    return "\n".join(block.text or "" for block in content)


def _messages_of(message: _Message, field: str) -> list[dict[str, Any]]:
    """Return a message as messages of a chat, where each result of a tool is a message."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results, texts, calls = [], [], []
    for at, block in enumerate(message.content):
        if block.type == "tool_use":
            function = {"name": block.name, "arguments": json.dumps(block.input or {})}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif block.type == "tool_result":
            content = _result(block.content, f"{field}.{at}.content")
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        else:
            texts.append(_text_of([block], f"{field}.{at}"))
    said: list[dict[str, Any]] = []
    if texts or not (results or calls):
        said = [{"role": message.role, "content": "\n".join(texts)}]
    if calls:
        said = [{"role": message.role, "content": "\n".join(texts) or None, "tool_calls": calls}]
    return [*results, *said]


def _result(content: str | list[dict[str, Any]] | None, field: str) -> str:
    if not isinstance(content, list):
        return content or ""
    if any(part.get("type") != "text" or not isinstance(part.get("text"), str) for part in content):
        raise Refusal(400, f"{field} must be text, or blocks of text", field)
    return "\n".join(part["text"] for part in content)


def error_document(status: int, message: str) -> dict[str, Any]:
    """Return Anthropic's error document."""
    kind = _ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


class MessageDocuments(BlockStream):
    """The documents of one answer."""

    def __init__(self, style: ChatStyle, id: str, model: str, created: int, prompt_tokens: int) -> None:
        super().__init__(style, id, model, created)
        self._prompt_tokens = prompt_tokens
        self._blocks = 0
        self._calls = False

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        (piece,) = pieces
        message = self.style.message(piece)
        self._ended(piece)
        content: list[dict[str, Any]] = []
        if message["content"]:
            content.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls", ()):
            self._calls = True
            function = call["function"]
            arguments = _arguments_of(function["arguments"])
            content.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
        return {**self._message(usage), "content": content, **self._stop}

    def opening(self, index: int, so_far: Usage | None = None) -> bytes:
        self._events.append({"type": "message_start", "message": self._message(Usage(self._prompt_tokens))})
        return self._written()

    def end(self, usage: Usage) -> bytes:
        self._events.append({"type": "message_delta", "delta": self._stop, "usage": _usage(usage)})
        self._events.append({"type": "message_stop"})
        return self._written()

    def failure(self, error: dict[str, Any]) -> bytes:
        self._events.append(error_document(error["code"], error["message"]))
        return self._written()

    @property
    def _stop(self) -> dict[str, Any]:
        if isinstance(self.stopped_by, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": self.stopped_by}
        finish = "tool_calls" if self._calls and self.finish == "stop" else self.finish
        return {"stop_reason": _ENDS.get(finish, finish), "stop_sequence": None}

    def _message(self, usage: Usage) -> dict[str, Any]:
        about = {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": []}
        return {**about, "stop_reason": None, "stop_sequence": None, "usage": _usage(usage)}

    def _begin(self, block: dict[str, Any]) -> None:
        self._events.append({"type": "content_block_start", "index": self._blocks, "content_block": block})

    def _delta(self, **delta: str) -> None:
        self._events.append({"type": "content_block_delta", "index": self._blocks, "delta": delta})

    def _begin_text(self) -> None:
        self._begin({"type": "text", "text": ""})

    def _text(self, text: str) -> None:
        self._delta(type="text_delta", text=text)

    def _begin_call(self, id: str, name: str) -> None:
        self._calls = True
        self._begin({"type": "tool_use", "id": id, "name": name, "input": {}})

    def _arguments(self, arguments: str) -> None:
        self._delta(type="input_json_delta", partial_json=arguments)

    def _end_block(self) -> None:
        self._events.append({"type": "content_block_stop", "index": self._blocks})
        self._blocks += 1


def _arguments_of(written: str) -> Any:
    """Return the arguments of a call; an answer that was cut has none that can be read."""
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        return {}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,  # Anthropic counts the two apart
        "output_tokens": usage.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
    }
