"""Failures that a client asks a twin for in a request's header, so that it can test what it does about them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from typing import Any, NamedTuple

from msgspec.structs import replace

from tokentwin.apiserver.messages import Output
from tokentwin.apiserver.openai_api.answers import AnswerDocuments, Piece, Usage
from tokentwin.apiserver.openai_api.refusal import Refusal

HEADER = "X-Twin-Failure"
_FORMS = "status=429 (400 to 599), stall=2.5 (seconds), cut=20 (tokens) or broken"


class PlantedFailure(NamedTuple):
    """A failure of one answer.

    Attributes:
        status: HTTP status of the refusal; 0 if the request is answered
        stall_s: seconds for which the answer stops before its second token
        cut_after: number of tokens after which the connection breaks; None if it does not
        broken: True if every JSON document of the answer is incomplete
    """

    status: int = 0
    stall_s: float = 0.0
    cut_after: int | None = None
    broken: bool = False


def planted_failure(header: str, twin: bool) -> PlantedFailure:
    """Return the failure that the text of the header asks for. Raises Refusal if it is not one, or not of a twin."""
    if not header:
        return PlantedFailure()
    if not twin:
        raise Refusal(400, f"{HEADER}: works only on a twin; leave the header out", HEADER)
    kind, _, amount = (part.strip() for part in header.partition("="))
    try:
        failure = _failure(kind, amount)
    except ValueError:
        raise Refusal(400, f"{HEADER}: {header[:100]!r} is no failure; give {_FORMS}", HEADER) from None
    if failure.status:
        raise Refusal(failure.status, f"the header {HEADER} asks for this failure", retry_after_s=1)
    return failure


def planted_refusal(header: str, twin: bool) -> None:
    """Raise the Refusal that the header asks for at an endpoint where no other failure is possible."""
    if planted_failure(header, twin) != PlantedFailure():
        raise Refusal(400, f"{HEADER}: this endpoint knows only status; give status=429 (400 to 599)", HEADER)


def _failure(kind: str, amount: str) -> PlantedFailure:
    if kind == "broken" and not amount:
        return PlantedFailure(broken=True)
    if kind == "status" and 400 <= int(amount) <= 599:
        return PlantedFailure(status=int(amount))
    if kind == "stall" and 0 < float(amount) <= 3600:
        return PlantedFailure(stall_s=float(amount))
    if kind == "cut" and int(amount) >= 1:
        return PlantedFailure(cut_after=int(amount))
    raise ValueError


async def failing(outputs: AsyncIterable[Output], failure: PlantedFailure) -> AsyncIterator[Output]:
    """Yield the outputs of an answer with its failure: late, or until the connection is to be broken."""
    tokens = 0
    async for output in outputs:
        if failure.stall_s and not tokens and len(output.tokens) > 1:
            yield _first_token(output)
            tokens = 1
        tokens += len(output.tokens)
        if failure.stall_s and tokens > 1:
            await asyncio.sleep(failure.stall_s)
            failure = PlantedFailure()
        if failure.cut_after is not None and tokens >= failure.cut_after:
            kept = len(output.tokens) - (tokens - failure.cut_after)
            output.tokens, output.finish = output.tokens[:kept], "cut"
        yield output
        if output.finish == "cut":
            return


def _first_token(output: Output) -> Output:
    """Return an output with the first token of `output`, from which it is removed."""
    first = replace(output, tokens=output.tokens[:1], logprobs=output.logprobs and output.logprobs[:1], finish="")
    output.tokens, output.logprobs = output.tokens[1:], output.logprobs and output.logprobs[1:]
    output.prompt_logprobs = None
    return first


class BrokenDocuments:
    """The documents of an answer, without the second half of a whole document or of a chunk."""

    def __init__(self, documents: AnswerDocuments) -> None:
        self.every = documents.every
        self.whole = documents.whole
        self.opening = documents.opening
        self.end = documents.end
        self.failure = documents.failure
        self._documents = documents

    def encode(self, document: dict[str, Any]) -> Iterator[bytes]:
        return _half(b"".join(self._documents.encode(document)))

    def chunk(self, piece: Piece, so_far: Usage | None = None) -> Iterator[bytes]:
        yield from _half(b"".join(self._documents.chunk(piece, so_far)).rstrip())
        yield b"\n\n"


def _half(document: bytes) -> Iterator[bytes]:
    yield document[: len(document) // 2]
