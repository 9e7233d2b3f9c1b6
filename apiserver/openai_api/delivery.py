"""Delivery of an answer to its client, as one document or as a stream of chunks."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from itertools import chain
from math import inf
from time import monotonic_ns
from typing import Any, TypeVar

from aiohttp import web

from tokentwin.apiserver.engine_client import Answer
from tokentwin.apiserver.filler import Words
from tokentwin.apiserver.messages import Output
from tokentwin.apiserver.openai_api.answers import AnswerDocuments, Piece, Usage
from tokentwin.apiserver.openai_api.json_pieces import PIECE
from tokentwin.apiserver.openai_api.refusal import Refusal
from tokentwin.realengine.logit_rules import PromptLogprob
from tokentwin.realengine.tokenizer import Detokenizer

BEGUN = "begun"  # key of a request of whose answer a part is sent
_AT_A_TIME = 64  # answers or pieces after which other requests get their turn

Item = TypeVar("Item")


@dataclass(slots=True)
class Choice:
    """The choice `index` of a request: the engine's answer, and the detokenizer that turns its tokens into text.

    Attributes:
        outputs: the outputs of the answer, in a twin with the failure that the client asks for
        ends: tokens that end the choice; they become text only if `keeps_ends`. Such a token is the `stop_reason`,
            unless it is `silent`
        echo: text with which the choice begins; if `all_of_it`, generated text is dropped
        prompt: tokens of the prompt, which are sent with the first piece; None if they are not wanted
        scored: tokens of the prompt if their logprobs are sent with the first piece, else None; if `echoes`, these are
            the first logprobs of the choice. `score_top` is the number of alternatives
    """

    index: int
    answer: Answer
    outputs: AsyncIterable[Output]
    detokenizer: Detokenizer | Words
    usage: Usage
    ends: Sequence[int] = ()
    keeps_ends: bool = False
    silent: int | None = None
    echo: str = ""
    all_of_it: bool = False
    prompt: list[int] | None = None
    scored: list[int] | None = None
    score_top: int = 0
    echoes: bool = False
    first_text_ns: int = field(default=0, init=False)
    first_sent_ns: int = field(default=0, init=False)
    last_text_ns: int = field(default=0, init=False)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield the text piece by piece. Raises Refusal if the engine refuses the request or crashes."""
        text = self.echo
        async for output in self.outputs:
            if output.finish in ("refused", "crashed", "failed"):
                raise refusal_for(output)
            piece = self._piece(output)
            self.usage.completion_tokens += len(piece.tokens)
            self.usage.cached_tokens = output.cached or self.usage.cached_tokens
            if self.all_of_it:
                piece.text, piece.tokens, piece.logprobs = "", [], [] if self.echoes else None
            if self.scored is not None:
                scores: Iterable[PromptLogprob] | None = output.prompt_logprobs
                if scores is None:
                    scores = _Certain(self.scored[1:], self.score_top)
                piece.scored, piece.echoes, self.scored = (self.scored, scores), self.echoes, None
            piece.text, text = text + piece.text, ""
            piece.prompt, self.prompt = self.prompt, None
            self.last_text_ns = monotonic_ns()
            self.first_text_ns = self.first_text_ns or self.last_text_ns
            yield piece
            if output.finish == "cut":
                raise Cut

    def _piece(self, output: Output) -> Piece:
        """Return a piece with the text that the new tokens complete and, if the choice has ended, the reason."""
        text, tokens = "", output.tokens
        ended_by: str | int | None = None
        by_token = output.finish == "stop" and bool(tokens) and tokens[-1] in self.ends
        for at, token in enumerate(tokens[:-1] if by_token and not self.keeps_ends else tokens):
            text += self.detokenizer.push(token)
            if self.detokenizer.stopped:
                self.answer.stop()
                output.finish, tokens, ended_by = "stop", tokens[: at + 1], self.detokenizer.stopped_by
                break
        else:
            if output.finish:
                text += self.detokenizer.finish()
            if by_token and tokens[-1] != self.silent:
                ended_by = tokens[-1]
        logprobs = None if output.logprobs is None else output.logprobs[: len(tokens)]
        finish = output.finish if output.finish not in ("", "cut") else None
        return Piece(text, tokens, logprobs, finish, self.index, ended_by)

    def sent(self) -> None:
        """Note the time at which the first text of the choice was sent."""
        self.first_sent_ns = self.first_sent_ns or monotonic_ns()

    def delivered(self) -> None:
        """Report that the whole text of the choice was sent."""
        self.answer.delivered(self.first_text_ns, self.first_sent_ns, self.last_text_ns)


async def in_turns(items: Iterable[Item]) -> AsyncIterator[Item]:
    """Yield `items`; other requests get their turn after every 64 of them."""
    for number, item in enumerate(items, 1):
        yield item
        if number % _AT_A_TIME == 0:
            await asyncio.sleep(0)


async def at_intervals(
    outputs: AsyncIterable[Output], tokens: int, first_at_once: bool = True
) -> AsyncIterator[Output]:
    """Yield the outputs of an answer, merged so that each has at least this number of tokens.

    The last may have fewer, and with `first_at_once` the first, as with vLLM's `stream_interval`.
    """
    gathered: Output | None = None
    async for output in outputs:
        if gathered is None:
            gathered = output
        else:
            gathered.add(output)
        if gathered.finish or len(gathered.tokens) >= tokens or (first_at_once and gathered.tokens):
            yield gathered
            gathered, first_at_once = None, False


@dataclass(frozen=True, slots=True)
class _Certain:
    """The logprobs of a twin's prompt, which no model has judged: its tokens are certain, `top` others impossible."""

    tokens: Sequence[int]
    top: int

    def __iter__(self) -> Iterator[PromptLogprob]:
        for token in self.tokens:
            others = [(other, -inf) for other in range(self.top) if other != token]
            yield PromptLogprob(0.0, 1, [(token, 0.0), *others][: self.top])


async def pieces_of(choices: Sequence[Choice]) -> AsyncIterator[Piece]:
    """Yield the pieces of all choices in the order of their arrival; the next piece of a choice is made after one."""
    if len(choices) == 1:
        async for piece in choices[0].pieces():
            yield piece
        return
    made, done = 0, asyncio.Queue[asyncio.Task[Piece | None]]()
    waiting: dict[asyncio.Task[Piece | None], AsyncIterator[Piece]] = {}

    def await_next(source: AsyncIterator[Piece]) -> None:
        task = asyncio.ensure_future(_next(source))
        task.add_done_callback(done.put_nowait)
        waiting[task] = source

    try:
        for choice in choices:
            await_next(choice.pieces())
        while waiting:
            task = await done.get()
            source = waiting.pop(task)
            if (one := task.result()) is not None:
                await_next(source)
                yield one
            made += 1
            if made % _AT_A_TIME == 0:
                await asyncio.sleep(0)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)  # errors of cancelled choices do not matter


async def _next(source: AsyncIterator[Piece]) -> Piece | None:
    return await anext(source, None)


def refusal_for(output: Output) -> Refusal:
    """Return the refusal that a client gets for an output that is an error."""
    if output.status:
        return Refusal(output.status, output.reason, retry_after_s=1)
    if output.finish == "crashed":
        return Refusal(503, output.reason, retry_after_s=1)
    if "tokens" in output.reason or "blocks" in output.reason:
        return Refusal(400, output.reason, "prompt")
    return Refusal(429, output.reason, retry_after_s=1)


async def write_whole(
    request: web.Request,
    choices: Sequence[Choice],
    documents: AnswerDocuments,
    usage: Usage,
    handed_on: dict[str, Any] | None,
    picks: Picks,
) -> web.StreamResponse:
    """Send the answer as one document, and complete `usage`."""
    whole: dict[int, Piece] = {}
    texts: dict[int, StringIO] = defaultdict(StringIO)
    async for piece in pieces_of(choices):
        texts[piece.index].write(piece.text)
        if not documents.every and piece.logprobs is None:
            piece.tokens = []  # they are not written
        if (known := whole.get(piece.index)) is None:
            whole[piece.index] = piece
        else:
            known.add(piece)
    for index, text in texts.items():
        whole[index].text = text.getvalue()
    made_ns = monotonic_ns()
    _complete(usage, choices, picks.drawn)
    document = documents.whole(picks.best([whole[choice.index] for choice in choices]), usage)
    whole_document = document if handed_on is None else {**document, "kv_transfer_params": handed_on}
    response = await write_json(request, documents.encode(whole_document), _stalled(choices))
    async for choice in in_turns(choices):
        choice.answer.left(whole=True)
        choice.sent()
        choice.last_text_ns = made_ns
        choice.delivered()
    return response


async def write_json(
    request: web.Request, pieces: Iterator[bytes], headers: Mapping[str, str] | None = None
) -> web.StreamResponse:
    """Send a document that comes in pieces; if there are several, its length is not known. Then `BEGUN` is set."""
    first, second = next(pieces), next(pieces, None)
    response: web.StreamResponse
    if second is None:
        response = web.Response(body=first, content_type="application/json", charset="utf-8", headers=headers)
        await response.prepare(request)
    else:
        kind = {"Content-Type": "application/json; charset=utf-8"}
        response = web.StreamResponse(headers={**(headers or {}), **kind})
        request[BEGUN] = True
        await response.prepare(request)
        await _write(response, chain([first, second], pieces))
    await response.write_eof()
    return response


async def _write(response: web.StreamResponse, pieces: Iterable[bytes]) -> None:
    for piece in pieces:
        await response.write(piece)
        if len(piece) >= PIECE:
            await asyncio.sleep(0)  # other requests get their turn, even if the client reads at once


async def write_stream(
    request: web.Request,
    choices: Sequence[Choice],
    documents: AnswerDocuments,
    usage: Usage,
    so_far: bool,
    n: int,
    deadline_s: float,
) -> web.StreamResponse:
    """Send the answer as a stream while it is generated, and complete `usage`; each prompt has `n` choices.

    If `so_far`, every chunk has the usage so far. Raises ErrorSent if an error was sent in the stream, and Refusal if
    an error occurred before the first byte.
    """
    headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    response: web.StreamResponse | None = None
    try:
        async with asyncio.timeout(deadline_s):
            async for piece in pieces_of(choices):
                choice = choices[piece.index]
                if response is None:
                    response = web.StreamResponse(headers={**headers, **_stalled(choices)})
                    await response.prepare(request)
                    openings = [
                        documents.opening(one.index, Usage(one.usage.prompt_tokens) if so_far else None)
                        for one in choices
                    ]
                    if any(openings):
                        await response.write(b"".join(openings))
                if documents.every or piece.text or piece.finish or piece.logprobs:
                    await _write(response, documents.chunk(piece, choice.usage if so_far else None))
                    choice.answer.left()
                choice.sent()
    except (Refusal, TimeoutError) as error:
        refusal = error if isinstance(error, Refusal) else timed_out()
        if response is None:
            raise refusal from None
        await response.write(documents.failure(refusal.document()["error"]))
        await response.write_eof()
        raise ErrorSent(response, refusal.message) from error
    assert response is not None
    _complete(usage, choices, n)
    await response.write(documents.end(usage))
    await response.write_eof()
    async for choice in in_turns(choices):
        choice.delivered()
    return response


def _stalled(choices: Sequence[Choice]) -> dict[str, str]:
    """Return the header that tells for how long the twin's machine stalled so far; none if it did not."""
    stalled_ms = max(choice.answer.stalled_ms for choice in choices)
    return {"X-Twin-Stalled-Ms": str(stalled_ms)} if stalled_ms else {}


def _complete(usage: Usage, choices: Sequence[Choice], drawn: int) -> None:
    """Add the tokens of all choices, and the cached tokens of each of the prompts, which have `drawn` choices."""
    usage.completion_tokens = sum(choice.usage.completion_tokens for choice in choices)
    usage.cached_tokens = sum(choice.usage.cached_tokens for choice in choices[::drawn])


@dataclass(frozen=True, slots=True)
class Picks:
    """The choice of the `n` likeliest of the `drawn` answers to each prompt: by their mean logprob, as OpenAI's.

    If `drawn` is larger, all answers have logprobs; the client sees them if it `wants_logprobs`.
    """

    n: int
    drawn: int
    wants_logprobs: bool

    def best(self, pieces: list[Piece]) -> list[Piece]:
        """Return the answers that the client gets, numbered anew."""
        if self.n == self.drawn:
            return pieces
        best: list[Piece] = []
        for begin in range(0, len(pieces), self.drawn):
            best += sorted(pieces[begin : begin + self.drawn], key=_unlikely)[: self.n]
        for index, piece in enumerate(best):
            piece.index = index
            if not self.wants_logprobs:
                piece.logprobs = None
        return best


def _unlikely(piece: Piece) -> float:
    logprobs = piece.logprobs or []
    return -sum(one.logprob for one in logprobs) / max(len(logprobs), 1)


class ErrorSent(Exception):
    """An error that was already sent to the client, in `response`."""

    def __init__(self, response: web.StreamResponse, why: str) -> None:
        super().__init__(why)
        self.response = response


class Cut(Exception):
    """An order to break the connection, as if the server had died."""


def timed_out() -> Refusal:
    return Refusal(504, "the request took longer than this server allows")
