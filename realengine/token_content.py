"""What KV blocks hold, by actual token ids: the engine's prefix-cache identity, as in vLLM."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence

from realengine.sequence import TokenSequence
from serving.request import Request
from serving.workload import Span


class TokenContent:
    """Contents of a request's blocks from its token sequence."""

    ahead = 0

    def __init__(self, sequences: Mapping[int, TokenSequence], block_size: int) -> None:
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
