"""The content of KV blocks by actual token ids: the prefix-cache identity of an engine that has them, as in vLLM."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from serving.request import Request
from serving.workload import Span


class Tokens(Protocol):
    """The prompt and output token ids of one request, as far as they are known."""

    @property
    def tokens(self) -> Sequence[int]: ...


class TokenContent:
    """The contents of a request's blocks from its token ids, in `sequences` by the request's id."""

    lookahead = 0

    def __init__(self, sequences: Mapping[int, Tokens], block_size: int) -> None:
        self._sequences = sequences
        self._block_size = block_size

    def spans(self, request: Request) -> Sequence[Span]:
        spans, size = request.spans, self._block_size
        for block in self.blocks(request, len(spans), request.known // size - 1):
            spans.append((block, len(spans) * size, (len(spans) + 1) * size))
        return spans

    def blocks(self, request: Request, first: int, last: int) -> Iterator[bytes]:
        tokens = self._sequences[request.id].tokens
        for index in range(first, last + 1):
            yield array("q", tokens[index * self._block_size : (index + 1) * self._block_size]).tobytes()
