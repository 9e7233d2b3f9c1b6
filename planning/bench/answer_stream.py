"""The answer to one request over HTTP: server-sent events, their times, and the end of the stream."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from typing import Any


class Events:
    """A parser that splits a byte stream into server-sent events, and yields the JSON document of each as it comes."""

    def __init__(self) -> None:
        self._rest = b""

    def push(self, data: bytes) -> Iterator[Any]:
        """Yield the documents that `data` completes; None stands for the last event, `[DONE]`.

        Raises ValueError for bad JSON.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                text = line[5:].strip()
                yield None if text == b"[DONE]" else json.loads(text)


class Answered:
    """An answer that is being received. Its times are the arrival times of the chunks with its tokens, in ns.

    Attributes:
        ended: True if the server has sent the end of the stream
        tokens: the answer's token ids, if the server gives them
        error: the error message with which the server broke the answer off, if it did
        counted: True if each chunk stated its number of tokens; otherwise a chunk with text counts as one token
        prompt_tokens, output_tokens, cached_tokens: numbers of tokens that the server states; None if it states none
    """

    def __init__(self) -> None:
        self.times_ns = array("q")
        self.tokens: list[int] = []
        self.ended = False
        self.error = ""
        self.counted = True
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def take(self, document: Any, now_ns: int) -> None:
        """Add a received document to the answer. Raises ValueError if it is not in OpenAI's format."""
        if document is None:
            self.ended = True
            return
        try:
            self._take(document, now_ns)
        except (AttributeError, TypeError):
            raise ValueError(f"an event is not in OpenAI's format: {str(document)[:80]}") from None

    def _take(self, document: dict[str, Any], now_ns: int) -> None:
        if error := document.get("error"):
            self.error = message_of(error)
        if usage := document.get("usage"):
            self.prompt_tokens = _stated(usage.get("prompt_tokens"))
            self.output_tokens = _stated(usage.get("completion_tokens"))
            self.cached_tokens = _stated((usage.get("prompt_tokens_details") or {}).get("cached_tokens"))
        for choice in document.get("choices") or ():
            self._choose(choice, now_ns)

    def _choose(self, choice: dict[str, Any], now_ns: int) -> None:
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
        tokens = choice.get("token_ids")
        if text:
            self._texts.append("" + text)
        if tokens is None:
            self.counted = self.counted and not text
        else:
            self.tokens += map(_count, tokens)
        self.times_ns.extend([now_ns] * (bool(text) if tokens is None else len(tokens)))
        self.ended = self.ended or choice.get("finish_reason") is not None


def _count(number: Any) -> int:
    if not isinstance(number, int) or not 0 <= number < 1 << 31:
        raise TypeError
    return number


def _stated(number: Any) -> int | None:
    return None if number is None else _count(number)


def refusal(body: bytes) -> str:
    """Return the message in the body of a refusal, in one line."""
    try:
        return message_of(json.loads(body))
    except (ValueError, RecursionError):
        return message_of(body.decode(errors="replace"))


def message_of(error: Any) -> str:
    """Return the message of an error document, in one line."""
    if isinstance(error, dict):
        inner = error.get("error")
        error = message_of(inner) if inner else error.get("message") or error.get("detail") or error
    text = str(error).encode(errors="replace").decode()  # JSON may have half of a surrogate pair
    return " ".join(text.split())[:300]
