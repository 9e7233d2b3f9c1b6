"""What KV blocks hold, by actual token ids: the engine's prefix-cache identity, as in vLLM."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping

from realengine.sequence import TokenSequence
from serving.request import Request


class TokenContent:
    """Contents of a request's blocks from its token sequence."""

    def __init__(self, sequences: Mapping[int, TokenSequence], block_size: int) -> None:
        self._sequences = sequences
        self._block_size = block_size

    def blocks(self, request: Request, first: int, last: int) -> Iterator[bytes]:
        tokens = self._sequences[request.id].tokens
        for index in range(first, last + 1):
            yield array("q", tokens[index * self._block_size : (index + 1) * self._block_size]).tobytes()
