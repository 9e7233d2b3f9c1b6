"""An answer on its way to its client: text by text as its tokens come, whole or streamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from time import monotonic_ns
from typing import Any

from aiohttp import web

from apiserver.answers import DONE, Documents, Piece, Usage, event
from apiserver.engine_client import Answer
from apiserver.filler import Words
from apiserver.messages import Output
from apiserver.refusal import Refusal
from realengine.detokenizer import Detokenizer


async def pieces_of(answer: Answer, detokenizer: Detokenizer | Words, usage: Usage) -> AsyncIterator[Piece]:
    """The answer, text by text. Raises Refusal when it comes to nothing."""
    async for output in answer:
        if output.finish in ("refused", "crashed"):
            raise _refusal(output)
        text = ""
        for at, token in enumerate(output.tokens):
            text += detokenizer.push(token)
            if detokenizer.stopped:
                answer.stop()
                output.finish, output.tokens = "stop", output.tokens[: at + 1]
                break
        if output.finish and not detokenizer.stopped:
            text += detokenizer.finish()
        usage.completion_tokens += len(output.tokens)
        logprobs = None if output.logprobs is None else output.logprobs[: len(output.tokens)]
        yield Piece(text, output.tokens, logprobs, output.finish if output.finish not in ("", "cut") else None)
        if output.finish == "cut":
            raise Cut


def _refusal(output: Output) -> Refusal:
    if output.status:
        return Refusal(output.status, output.reason, retry_after_s=1)
    if output.finish == "crashed":
        return Refusal(503, output.reason, retry_after_s=1)
    if "tokens" in output.reason or "blocks" in output.reason:
        return Refusal(400, output.reason, "prompt")
    return Refusal(429, output.reason, retry_after_s=1)


async def write_whole(
    request: web.Request,
    answer: Answer,
    pieces: AsyncIterator[Piece],
    documents: Documents,
    usage: Usage,
    handed_on: dict[str, Any] | None,
) -> web.Response:
    text, tokens, finish, first_ns = "", [], None, 0
    logprobs: list[float] | None = None
    async for piece in pieces:
        first_ns = first_ns or monotonic_ns()
        text += piece.text
        tokens += piece.tokens
        if piece.logprobs is not None:
            logprobs = logprobs or []
            logprobs += piece.logprobs
        finish = piece.finish
    made_ns = monotonic_ns()
    document = documents.whole(Piece(text, tokens, logprobs, finish), usage)
    response = web.json_response(document if handed_on is None else {**document, "kv_transfer_params": handed_on})
    await response.prepare(request)
    await response.write_eof()
    answer.left(whole=True)
    answer.delivered(first_ns, monotonic_ns(), made_ns)
    return response


async def write_stream(
    request: web.Request,
    answer: Answer,
    pieces: AsyncIterator[Piece],
    documents: Documents,
    usage: Usage | None,
    deadline_s: float,
) -> web.StreamResponse:
    headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    response: web.StreamResponse | None = None
    first_text_ns = first_sent_ns = last_text_ns = 0
    try:
        async with asyncio.timeout(deadline_s):
            async for piece in pieces:
                last_text_ns = monotonic_ns()
                if response is None:
                    response = web.StreamResponse(headers=headers)
                    await response.prepare(request)
                    if opening := documents.opening():
                        await response.write(opening)
                if documents.every or piece.text or piece.finish or piece.logprobs:
                    await response.write(documents.chunk(piece))
                    answer.left()
                if not first_sent_ns:
                    first_text_ns, first_sent_ns = last_text_ns, monotonic_ns()
    except (Refusal, TimeoutError) as error:
        refusal = error if isinstance(error, Refusal) else timed_out()
        if response is None:
            raise refusal from None
        await response.write(event(refusal.document()) + DONE)
        await response.write_eof()
        raise Told(response, refusal.message) from error
    assert response is not None
    await response.write((documents.usage(usage) if usage else b"") + DONE)
    await response.write_eof()
    answer.delivered(first_text_ns, first_sent_ns, last_text_ns)
    return response


class Told(Exception):
    """The client knows already, by `response`."""

    def __init__(self, response: web.StreamResponse, why: str) -> None:
        super().__init__(why)
        self.response = response


class Cut(Exception):
    """The connection is to break, as if the server had died."""


def timed_out() -> Refusal:
    return Refusal(504, "the request took longer than this server allows")
