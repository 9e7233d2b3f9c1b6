"""`POST /v1/responses`, OpenAI's Responses API: a chat in another form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

from pydantic import ConfigDict, Field, StrictBool

from tokentwin.apiserver.openai_api.answers import ChatStyle, Piece, Usage
from tokentwin.apiserver.openai_api.block_stream import BlockStream
from tokentwin.apiserver.openai_api.limited import Limited, at_most
from tokentwin.apiserver.openai_api.protocol import MOST_MESSAGES, MOST_TOOLS, Label, neutral
from tokentwin.apiserver.openai_api.refusal import Refusal

_MOST_METADATA = 16
_SAME = (
    *("model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "user", "priority", "request_id"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos", "min_tokens", "parallel_tool_calls"),
    *("chat_template_kwargs", "metadata", "cache_salt", "vllm_xargs", "mm_processor_kwargs", "include_reasoning"),
)


class _Tool(Limited):
    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class _NamedTool(Limited):
    type: Literal["function"]
    name: str


class _Form(Limited):
    model_config = ConfigDict(populate_by_name=True)
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    described: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: StrictBool | None = None


class _Text(Limited):
    format: _Form = Field(default_factory=_Form)
    verbosity: neutral(None, "medium") = None  # type: ignore[valid-type]


class _Reasoning(Limited):
    effort: Label | None = None
    summary: Label | None = None
    generate_summary: Label | None = None


class ResponsesRequest(Limited):
    """The body of the request, with OpenAI's and vLLM's names."""

    names: ClassVar = {
        "max_completion_tokens": "max_output_tokens",
        "messages": "input",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
    }
    model: Label | None = None
    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(strict=True, ge=1)] | None = None
    tools: Annotated[list[_Tool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | _NamedTool | None = None
    text: _Text | None = None
    stream: StrictBool | None = False
    reasoning: _Reasoning | None = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    seed: Any = None
    stop: Any = None
    user: Any = None
    priority: Any = None
    request_id: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    ignore_eos: Any = None
    min_tokens: Any = None
    parallel_tool_calls: Any = None
    chat_template_kwargs: Any = None
    cache_salt: Any = None
    vllm_xargs: Any = None
    mm_processor_kwargs: Any = None
    include_reasoning: Any = None
    metadata: Annotated[dict[str, str], at_most(_MOST_METADATA)] | None = None

    truncation: Literal["auto", "disabled"] | None = None

    # Fields without effect here
    store: StrictBool | None = None  # nothing is stored
    service_tier: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Label | None = None

    # Fields that are not supported
    background: neutral(None, False) = None  # type: ignore[valid-type]
    context_management: neutral(None, []) = None  # type: ignore[valid-type]
    conversation: neutral(None) = None  # type: ignore[valid-type]
    include: neutral(None, [], ["reasoning.encrypted_content"]) = None  # type: ignore[valid-type]
    max_tool_calls: neutral(None) = None  # type: ignore[valid-type]
    previous_response_id: neutral(None) = None  # type: ignore[valid-type]
    prompt: neutral(None) = None  # type: ignore[valid-type]
    stream_options: neutral(None, {}, {"include_obfuscation": False}) = None  # type: ignore[valid-type]
    top_logprobs: neutral(None, 0) = None  # type: ignore[valid-type]

    def as_chat(self) -> dict[str, Any]:
        """Return the body of `POST /v1/chat/completions` that asks the same.

        Raises Refusal for other items than text and tool calls.
        """
        same = {name: value for name in _SAME if (value := getattr(self, name)) is not None}
        chat = {**same, "messages": self._messages(), "max_completion_tokens": self.max_output_tokens}
        if self.truncation == "auto":
            chat["truncate_prompt_tokens"] = -1
        if self.reasoning is not None and self.reasoning.effort is not None:
            chat["reasoning_effort"] = self.reasoning.effort
        if self.tools:
            chat["tools"] = [
                {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
                for tool in self.tools
            ]
        if isinstance(self.tool_choice, _NamedTool):
            chat["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        elif self.tool_choice is not None:
            chat["tool_choice"] = self.tool_choice
        form = self.text.format if self.text is not None else _Form()
        if form.type == "json_schema":
            schema = {"name": form.name or "answer", "schema": form.described}
            chat["response_format"] = {"type": form.type, "json_schema": schema}
        elif form.type == "json_object":
            chat["response_format"] = {"type": form.type}
        return chat

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        for at, item in enumerate(items):
            kind = item.get("type", "message")
            if kind == "message":
                content = _text_of(item.get("content"), f"input.{at}.content")
                messages.append({"role": item.get("role"), "content": content})
            elif kind == "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                if not messages or "tool_calls" not in messages[-1]:
                    messages.append({"role": "assistant", "content": None, "tool_calls": []})
                messages[-1]["tool_calls"].append(call)
            elif kind == "function_call_output":
                output = _text_of(item.get("output"), f"input.{at}.output")
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
            else:
                raise Refusal(400, f"input.{at}.type: {str(kind)[:40]!r} is not supported; leave it out", "input")
        return messages


def _text_of(content: Any, field: str) -> Any:
    """Return the text of `content`, which may be a list of parts; other values are checked as those of a chat."""
    if not isinstance(content, list):
        return content
    if not all(
        isinstance(part, dict)
        and part.get("type") in ("input_text", "output_text", "text")
        and isinstance(part.get("text"), str)
        for part in content
    ):
        raise Refusal(400, f"{field} must be parts of text; nothing else is supported", "input")
    return "\n".join(part["text"] for part in content)


class ResponseDocuments(BlockStream):
    """The documents of the answer to `asked`."""

    def __init__(self, asked: ResponsesRequest, style: ChatStyle, id: str, model: str, created: int) -> None:
        super().__init__(style, id, model, created)
        asked.input = ""  # it may be long, and is not repeated
        self._asked = asked
        self._output: list[dict[str, Any]] = []
        self._number = -1

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        (piece,) = pieces
        message = self.style.message(piece)
        self._ended(piece)
        if message["content"]:
            self._output.append(self._message(message["content"]))
        for call in message.get("tool_calls", ()):
            function = call["function"]
            self._output.append(_call(call["id"], function["name"], function["arguments"], "completed"))
        return self._document(self._status, usage)

    def opening(self, index: int, so_far: Usage | None = None) -> bytes:
        self._send("response.created", response=self._document("in_progress"))
        self._send("response.in_progress", response=self._document("in_progress"))
        return self._written()

    def end(self, usage: Usage) -> bytes:
        self._send(f"response.{self._status}", response=self._document(self._status, usage))
        return self._written()

    def failure(self, error: dict[str, Any]) -> bytes:
        self._send("error", message=error["message"], code=str(error["code"]), param=error["param"])
        return self._written()

    @property
    def _status(self) -> str:
        return "incomplete" if self.finish == "length" else "completed"

    def _document(self, status: str, usage: Usage | None = None) -> dict[str, Any]:
        asked = self._asked.model_dump(mode="json", by_alias=True)
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model,
            "output": self._output,
            "usage": None if usage is None else _usage(usage),
            "store": False,
            "background": False,
            "truncation": asked["truncation"] or "disabled",
            "metadata": asked["metadata"] or {},
            "parallel_tool_calls": asked["parallel_tool_calls"] is not False,
            "tool_choice": asked["tool_choice"] or "auto",
            "tools": asked["tools"] or [],
            "text": asked["text"] or {"format": {"type": "text"}},
            "reasoning": asked["reasoning"] or {"effort": None, "summary": None},
            "temperature": 1.0 if asked["temperature"] is None else asked["temperature"],
            "top_p": 1.0 if asked["top_p"] is None else asked["top_p"],
            **{
                name: asked[name]
                for name in ("instructions", "max_output_tokens", "previous_response_id", "service_tier", "user")
            },
        }

    def _send(self, type: str, **fields: Any) -> None:
        self._number += 1
        self._events.append({"type": type, "sequence_number": self._number, **fields})

    def _message(self, text: str, status: str = "completed", parts: bool = True) -> dict[str, Any]:
        content = [_part(text)] if parts else []
        return {"type": "message", "id": _id("msg"), "role": "assistant", "status": status, "content": content}

    def _begin(self, item: dict[str, Any]) -> None:
        self._send("response.output_item.added", output_index=len(self._output), item=item)
        self._output.append({**item, "status": "completed"})
        self._place = {"item_id": item["id"], "output_index": len(self._output) - 1}

    def _begin_text(self) -> None:
        self._begin(self._message("", "in_progress", parts=False))
        self._output[-1]["content"] = [_part("")]
        self._place["content_index"] = 0
        self._send("response.content_part.added", **self._place, part=_part(""))

    def _text(self, text: str) -> None:
        self._output[-1]["content"][0]["text"] += text
        self._send("response.output_text.delta", **self._place, delta=text, logprobs=[])

    def _begin_call(self, id: str, name: str) -> None:
        self._begin(_call(id, name, "", "in_progress"))

    def _arguments(self, arguments: str) -> None:
        self._output[-1]["arguments"] += arguments
        self._send("response.function_call_arguments.delta", **self._place, delta=arguments)

    def _end_block(self) -> None:
        item = self._output[-1]
        if item["type"] == "message":
            (part,) = item["content"]
            self._send("response.output_text.done", **self._place, text=part["text"], logprobs=[])
            self._send("response.content_part.done", **self._place, part=part)
        else:
            written = {"name": item["name"], "arguments": item["arguments"]}
            self._send("response.function_call_arguments.done", **self._place, **written)
        self._send("response.output_item.done", output_index=self._place["output_index"], item=item)


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid4().hex}"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}


def _call(id: str, name: str, arguments: str, status: str) -> dict[str, Any]:
    named = {"call_id": id, "name": name, "arguments": arguments}
    return {"type": "function_call", "id": _id("fc"), **named, "status": status}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
