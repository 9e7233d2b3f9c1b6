"""OpenAI's documents of an answer: whole, or chunk by chunk."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import msgspec

from apiserver.filler import Texts


@dataclass(slots=True)
class Piece:
    """Some text of an answer, the tokens that completed it, and how it ended, if it has."""

    text: str
    tokens: list[int]
    logprobs: list[float] | None
    finish: str | None


@dataclass(slots=True)
class Usage:
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int = 0

    def document(self) -> dict[str, int]:
        """As `usage`."""
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }


@dataclass(slots=True)
class CompletionStyle:
    """How `/v1/completions` words its answers. `token_ids`: whether choices hold their tokens, too, as vLLM's may."""

    texts: Texts
    token_ids: bool = False
    object: str = "text_completion"
    chunk_object: str = "text_completion"
    _offset: int = field(default=0, init=False)

    def opening(self) -> dict[str, Any] | None:
        """Nothing comes before the first text."""
        return None

    def choice(self, piece: Piece) -> dict[str, Any]:
        """The one of `choices`."""
        logprobs = None
        if piece.logprobs is not None:
            words = [self.texts.decode([token]) for token in piece.tokens]
            offsets = []
            for word in words:
                offsets.append(self._offset)
                self._offset += len(word)
            logprobs = {
                "tokens": words,
                "token_logprobs": piece.logprobs,
                "top_logprobs": None,
                "text_offset": offsets,
            }
        end = {"logprobs": logprobs, "finish_reason": piece.finish}
        return {"index": 0, "text": piece.text, **end, **_token_ids(self, piece)}

    delta = choice


@dataclass(slots=True)
class ChatStyle:
    """The same of `/v1/chat/completions`."""

    texts: Texts
    token_ids: bool = False
    object: str = "chat.completion"
    chunk_object: str = "chat.completion.chunk"

    def opening(self) -> dict[str, Any] | None:
        """The first delta says who speaks."""
        return {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def choice(self, piece: Piece) -> dict[str, Any]:
        """The one of `choices`."""
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"index": 0, "message": message, **self._end(piece)}

    def delta(self, piece: Piece) -> dict[str, Any]:
        """The one of a chunk's `choices`."""
        return {"index": 0, "delta": {"content": piece.text} if piece.text else {}, **self._end(piece)}

    def _end(self, piece: Piece) -> dict[str, Any]:
        logprobs = None
        if piece.logprobs is not None:
            content = [
                {"token": word, "logprob": logprob, "bytes": list(word.encode()), "top_logprobs": []}
                for word, logprob in zip(map(self._word, piece.tokens), piece.logprobs, strict=True)
            ]
            logprobs = {"content": content, "refusal": None}
        return {"logprobs": logprobs, "finish_reason": piece.finish, **_token_ids(self, piece)}

    def _word(self, token: int) -> str:
        return self.texts.decode([token])


Style = CompletionStyle | ChatStyle


def _token_ids(style: Style, piece: Piece) -> dict[str, Any]:
    return {"token_ids": piece.tokens} if style.token_ids else {}


class Documents:
    """The documents of one answer: `id`, `model` and `created` (seconds since 1970) are the same in each.

    Every chunk tells `so_far`, if it is given.
    """

    def __init__(self, style: Style, id: str, model: str, created: int, so_far: Usage | None = None) -> None:
        self._style = style
        self._so_far = so_far
        self._text_alone = so_far is None and not style.token_ids
        self.every = style.token_ids  # a chunk for every token, even if there is nothing to read yet
        self._about = {"id": id, "created": created, "model": model}
        self._before, self._after = self._event([style.delta(Piece("\0", [], None, None))]).split(rb'"\u0000"')

    def whole(self, piece: Piece, usage: Usage) -> dict[str, Any]:
        """The answer in one document."""
        choices = [self._style.choice(piece)]
        return {**self._about, "object": self._style.object, "choices": choices, "usage": usage.document()}

    def opening(self) -> bytes:
        """What a stream begins with, if with anything."""
        choice = self._style.opening()
        return b"" if choice is None else self._event([choice])

    def chunk(self, piece: Piece) -> bytes:
        """A server-sent event with some text; where it is text alone, all but that was made before."""
        if self._text_alone and piece.finish is None and piece.logprobs is None:
            return self._before + msgspec.json.encode(piece.text) + self._after
        usage = {} if self._so_far is None else {"usage": self._so_far.document()}
        return self._event([self._style.delta(piece)], **usage)

    def usage(self, usage: Usage) -> bytes:
        """The event before the last, where it was asked for."""
        return self._event([], usage=usage.document())

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return event({**self._about, "object": self._style.chunk_object, "choices": choices, **more})


DONE = b"data: [DONE]\n\n"


def event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"
