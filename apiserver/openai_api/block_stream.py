"""The form of a streamed answer that is a sequence of blocks, each with text or with a tool call.

OpenAI's Responses API and Anthropic's Messages API have it, with other names of the events.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from tokentwin.apiserver.openai_api.answers import ChatStyle, Piece, Usage
from tokentwin.apiserver.openai_api.json_pieces import json_pieces


class BlockStream(ABC):
    """The documents of one answer; the methods with an underscore add to `_events` what a client reads.

    Attributes:
        every: True if there is a chunk for every token
        finish: OpenAI's finish reason; empty while the answer goes on
        stopped_by: the stop string that ended the answer, if any
    """

    every = False
    encode = staticmethod(json_pieces)

    def __init__(self, style: ChatStyle, id: str, model: str, created: int) -> None:
        self.style, self.id, self.model, self.created = style, id, model, created
        self.finish = ""
        self.stopped_by: str | int | None = None
        self._events: list[dict[str, Any]] = []
        self._open = ""  # what the open block has: `text`, `call` or nothing

    @abstractmethod
    def whole(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        """Return the whole answer as one document."""

    @abstractmethod
    def opening(self, index: int, so_far: Usage | None = None) -> bytes:
        """Return the first events of a stream."""

    @abstractmethod
    def end(self, usage: Usage) -> bytes:
        """Return the last events of a stream."""

    @abstractmethod
    def failure(self, error: dict[str, Any]) -> bytes:
        """Return the event of an error, of which OpenAI's document is given."""

    def chunk(self, piece: Piece, so_far: Usage | None = None) -> Sequence[bytes]:
        """Return the events that a piece of the answer adds."""
        delta = self.style.delta(piece)
        if text := delta.get("content"):
            if self._open != "text":
                self._close()
                self._begin_text()
                self._open = "text"
            self._text(text)
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                self._close()
                self._begin_call(call["id"], call["function"]["name"])
                self._open = "call"
            if arguments := call["function"]["arguments"]:
                self._arguments(arguments)
        if piece.finish:
            self._close()
            self._ended(piece)
        return (self._written(),)

    def _close(self) -> None:
        if self._open:
            self._end_block()
        self._open = ""

    def _ended(self, piece: Piece) -> None:
        calls = self.style.calls
        self.finish = (piece.finish if calls is None else calls.finish(piece.index, piece.finish)) or ""
        self.stopped_by = piece.ended_by

    def _written(self) -> bytes:
        events, self._events = self._events, []
        lines = (f"event: {one['type']}\ndata: {json.dumps(one, separators=(',', ':'))}\n\n" for one in events)
        return "".join(lines).encode()

    @abstractmethod
    def _begin_text(self) -> None: ...
    @abstractmethod
    def _text(self, text: str) -> None: ...
    @abstractmethod
    def _begin_call(self, id: str, name: str) -> None: ...
    @abstractmethod
    def _arguments(self, arguments: str) -> None: ...
    @abstractmethod
    def _end_block(self) -> None: ...
