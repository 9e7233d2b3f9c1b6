"""The JSON documents of OpenAI's API for one answer, as a whole or in chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

from tokentwin.apiserver.filler import Texts
from tokentwin.apiserver.openai_api.json_pieces import encode, json_pieces
from tokentwin.apiserver.openai_api.tools import Calls, ChosenCalls
from tokentwin.realengine.logit_rules import Logprob, PromptLogprob

_LEAST = -9999.0  # the smallest log-probability that is written, because JSON has no infinity


@dataclass(slots=True)
class Piece:
    """A piece of a choice: some text, the tokens that completed it, and the finish reason if the choice has ended.

    Attributes:
        index: index of the choice
        ended_by: the stop string, or the token of `stop_token_ids`, that ended the choice
        prompt: tokens of the prompt; None if the answer does not repeat them
        scored: tokens of the prompt, and the logprobs of all but the first of them; None if they are not wanted
        echoes: True if the logprobs of the piece begin with those of the prompt
    """

    text: str
    tokens: list[int]
    logprobs: list[Logprob] | None
    finish: str | None
    index: int = 0
    ended_by: str | int | None = None
    prompt: list[int] | None = None
    scored: tuple[list[int], Iterable[PromptLogprob]] | None = None
    echoes: bool = False

    def add(self, more: Piece) -> None:
        """Append the next piece of the same choice, without its text, in time that does not grow with the choice."""
        self.tokens += more.tokens
        if self.logprobs is not None:
            self.logprobs += more.logprobs or []
        self.finish, self.ended_by = more.finish, more.ended_by


@dataclass(slots=True)
class Usage:
    """The numbers of tokens of a request, or of one of its choices; the KV of `cached_tokens` was in the cache.

    OpenAI's `usage` has them only if it `shows_cached`, as in vLLM.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    shows_cached: bool = False

    def document(self) -> dict[str, Any]:
        """Return the JSON object `usage`."""
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens} if self.shows_cached else None,
        }


@dataclass(slots=True)
class Wording:
    """The options for writing tokens.

    Attributes:
        token_ids: True if choices also have token ids (vLLM's `return_token_ids`)
        by_number: True if a token with a log-probability is written as its id (vLLM's `return_tokens_as_token_ids`)
    """

    texts: Texts
    token_ids: bool = False
    by_number: bool = False
    _words: dict[int, str] = field(default_factory=dict, init=False)

    def word(self, token: int) -> str:
        """Return the text by which `token` is written with its log-probability."""
        if (word := self._words.get(token)) is None:
            word = f"token_id:{token}" if self.by_number else self.texts.decode([token], special=True)
            self._words[token] = word
        return word

    def end(self, piece: Piece) -> dict[str, Any]:
        """Return the last fields of a choice, which both styles have."""
        ended = {} if piece.finish is None else {"stop_reason": piece.ended_by}
        tokens = {"token_ids": piece.tokens} if self.token_ids else {}
        return {"finish_reason": piece.finish, **ended, **tokens}

    def prompt_logprobs(self, piece: Piece) -> Iterator[dict[int, Any] | None] | None:
        """Return vLLM's `prompt_logprobs`: of each token of the prompt but the first, and of the likeliest tokens."""
        if piece.scored is None:
            return None
        prompt, scores = piece.scored
        return chain([None], map(self._scored, prompt[1:], scores))

    def _scored(self, token: int, score: PromptLogprob) -> dict[int, Any]:
        ranked = [(token, score.logprob, score.rank)]
        ranked += [(other, logprob, rank) for rank, (other, logprob) in enumerate(score.top, 1) if other != token]
        return {
            one: {"logprob": max(logprob, _LEAST), "rank": rank, "decoded_token": self.word(one)}
            for one, logprob, rank in ranked
        }


@dataclass(slots=True)
class CompletionStyle:
    """The format of answers of `/v1/completions`."""

    wording: Wording
    object: str = "text_completion"
    chunk_object: str = "text_completion"
    id_prefix: str = "cmpl"
    _offsets: dict[int, int] = field(default_factory=dict, init=False)

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return None, because a completion has no chunk before its first text."""
        return None

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the choices of an answer in one document."""
        return {"choices": [self._whole(piece) for piece in pieces]}

    def _whole(self, piece: Piece) -> dict[str, Any]:
        return {**self.choice(piece), "prompt_logprobs": self.wording.prompt_logprobs(piece)}

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """Return the choice of one chunk."""
        return {"choices": [self.choice(piece)]}

    def choice(self, piece: Piece) -> dict[str, Any]:
        """Return one item of `choices`."""
        logprobs = None if piece.logprobs is None else self._logprobs(piece, piece.logprobs)
        prompt = {} if piece.prompt is None else {"prompt_token_ids": piece.prompt}
        return {"index": piece.index, "text": piece.text, "logprobs": logprobs, **self.wording.end(piece), **prompt}

    def _logprobs(self, piece: Piece, logprobs: list[Logprob]) -> dict[str, Any]:
        word, tokens = self.wording.word, piece.tokens
        of_prompt: Sequence[Iterable[PromptLogprob | None]] = ()
        if piece.echoes and piece.scored is not None:
            prompt, scored = piece.scored
            tokens, of_prompt = [*prompt, *tokens], ([None], scored)

        def alternatives(token: int, one: Logprob | PromptLogprob | None) -> dict[str, float] | None:
            if one is None:
                return None
            others = {word(other): max(logprob, _LEAST) for other, logprob in one.top}
            return {word(token): max(one.logprob, _LEAST)} | others

        return {
            "tokens": map(word, tokens),
            "token_logprobs": (one and max(one.logprob, _LEAST) for one in chain(*of_prompt, logprobs)),
            "top_logprobs": map(alternatives, tokens, chain(*of_prompt, logprobs)),
            "text_offset": self._text_offsets(piece.index, tokens),
        }

    def _text_offsets(self, index: int, tokens: Sequence[int]) -> Iterator[int]:
        for token in tokens:
            offset = self._offsets.get(index, 0)
            self._offsets[index] = offset + len(self.wording.word(token))
            yield offset


@dataclass(slots=True)
class ChatStyle:
    """The format of answers of `/v1/chat/completions`.

    Attributes:
        role: role of the message
        calls: the tool calls in the message; None if it has none
    """

    wording: Wording
    role: str = "assistant"
    calls: Calls | ChosenCalls | None = None
    object: str = "chat.completion"
    chunk_object: str = "chat.completion.chunk"
    id_prefix: str = "chatcmpl"

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the first delta of choice `index`, which names the role."""
        return {"index": index, "delta": {"role": self.role, "content": ""}, "logprobs": None, "finish_reason": None}

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the choices of an answer in one document, and the tokens of the prompt if they are wanted."""
        scores = self.wording.prompt_logprobs(pieces[0])
        return {"choices": list(map(self._choice, pieces)), "prompt_logprobs": scores, **_prompt(pieces[0])}

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """Return the choice of one chunk, and the tokens of the prompt if they are wanted."""
        delta = self.delta(piece)
        return {"choices": [{"index": piece.index, "delta": delta, **self._end(piece)}], **_prompt(piece)}

    def message(self, piece: Piece) -> dict[str, Any]:
        """Return the text and the tool calls of a whole answer."""
        return {"content": piece.text} if self.calls is None else self.calls.message(piece.index, piece.text)

    def _choice(self, piece: Piece) -> dict[str, Any]:
        said = self.message(piece)
        return {"index": piece.index, "message": {"role": self.role, "refusal": None, **said}, **self._end(piece)}

    def delta(self, piece: Piece) -> dict[str, Any]:
        """Return the text and the tool calls that a piece of a stream adds."""
        if self.calls is not None:
            return self.calls.delta(piece.index, piece.text, piece.finish is not None)
        return {"content": piece.text} if piece.text else {}

    def _end(self, piece: Piece) -> dict[str, Any]:
        logprobs = None
        if piece.logprobs is not None:
            content = (
                {**self._token(token, one.logprob), "top_logprobs": [self._token(*other) for other in one.top]}
                for token, one in zip(piece.tokens, piece.logprobs, strict=True)
            )
            logprobs = {"content": content, "refusal": None}
        end = self.wording.end(piece)
        if self.calls is not None:
            end["finish_reason"] = self.calls.finish(piece.index, piece.finish)
        return {"logprobs": logprobs, **end}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        word = self.wording.word(token)
        return {"token": word, "logprob": max(logprob, _LEAST), "bytes": list(word.encode())}


def _prompt(piece: Piece) -> dict[str, Any]:
    return {} if piece.prompt is None else {"prompt_token_ids": piece.prompt}


Style = CompletionStyle | ChatStyle


class Documents:
    """The documents of one answer: `id`, `model` and `created` (seconds since 1970) are the same in every document.

    The last event of a stream has the usage if the client `wants_usage`.
    """

    encode = staticmethod(json_pieces)

    def __init__(self, style: Style, id: str, model: str, created: int, wants_usage: bool = False) -> None:
        self._style = style
        self._wants_usage = wants_usage
        self.every = style.wording.token_ids  # true: send a chunk for every token, even if it completes no text
        self._text_alone = not self.every and not (isinstance(style, ChatStyle) and style.calls)
        self._about = {"id": id, "created": created, "model": model, "object": style.chunk_object}
        self._around: dict[int, tuple[bytes, bytes]] = {}  # bytes before and after the text of a chunk, by choice

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        """Return the whole answer as one document."""
        return {**self._about, "object": self._style.object, **self._style.whole(pieces), "usage": usage.document()}

    def opening(self, index: int, so_far: Usage | None = None) -> bytes:
        """Return the first event of a choice in a stream, or empty bytes if the style has no such event."""
        choice = self._style.opening(index)
        usage = {} if so_far is None else {"usage": so_far.document()}
        return b"" if choice is None else b"".join(event({**self._about, "choices": [choice], **usage}))

    def chunk(self, piece: Piece, so_far: Usage | None = None) -> Iterable[bytes]:
        """Return a chunk as the pieces of a server-sent event; if it has only text, it reuses the bytes around that.

        If `so_far` is given, the chunk has it as `usage`.
        """
        if so_far is None and self._text_alone and piece.finish is piece.logprobs is piece.prompt is None:
            before, after = self._around.get(piece.index) or self._frame(piece.index)
            return (before + encode(piece.text) + after,)
        usage = {} if so_far is None else {"usage": so_far.document()}
        return event({**self._about, **self._style.chunk(piece), **usage})

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        framed = event({**self._about, **self._style.chunk(Piece("\0", [], None, None, index))})
        before, after = b"".join(framed).split(rb'"\u0000"')
        self._around[index] = before, after
        return before, after

    def end(self, usage: Usage) -> bytes:
        """Return the last events of a stream."""
        if not self._wants_usage:
            return DONE
        return b"".join([*event({**self._about, "choices": [], "usage": usage.document()}), DONE])

    def failure(self, error: dict[str, Any]) -> bytes:
        """Return the last events of a stream that ends with an error, of which OpenAI's document is given."""
        return b"".join([*event({"error": error}), DONE])


class AnswerDocuments(Protocol):
    """The documents of an answer in the form of one of the APIs; see `Documents`."""

    @property
    def every(self) -> bool: ...
    def encode(self, document: dict[str, Any]) -> Iterator[bytes]: ...
    def whole(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]: ...
    def opening(self, index: int, so_far: Usage | None = None) -> bytes: ...
    def chunk(self, piece: Piece, so_far: Usage | None = None) -> Iterable[bytes]: ...
    def end(self, usage: Usage) -> bytes: ...
    def failure(self, error: dict[str, Any]) -> bytes: ...


DONE = b"data: [DONE]\n\n"


def event(document: dict[str, Any]) -> Iterator[bytes]:
    """Yield a server-sent event in pieces."""
    return chain([b"data: "], json_pieces(document), [b"\n\n"])
