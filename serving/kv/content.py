"""What a KV block holds, as a key: equal keys mean equal tokens from the start of the sequence.

Key of block i = H(key of block i-1, its content), so a key names a whole prefix; only full blocks have one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Protocol

from serving.deployments.config import SchedulerConfig
from serving.request import Request
from serving.workload import PRIVATE

ROOT = b""


class Content(Protocol):
    """Where block contents come from: segments in the simulator, token ids in a real engine."""

    def blocks(self, request: Request, first: int, last: int) -> Iterable[bytes]:
        """A canonical form of the tokens of each full block from `first` to `last`, inclusive."""
        ...


def block_keys(request: Request, count: int, content: Content) -> list[bytes]:
    """The chained keys of (at least) the first `count` blocks, kept on the request once computed."""
    keys = request.keys
    if len(keys) < count:
        parent = keys[-1] if keys else ROOT
        for block in content.blocks(request, len(keys), count - 1):
            parent = blake2b(parent + block, digest_size=16).digest()
            keys.append(parent)
    return keys


class SegmentContent:
    """Contents from the prompt's segments; the output of request r is segment `out:r`."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def blocks(self, request: Request, first: int, last: int) -> Iterator[bytes]:
        start, end = first * self._block_size, (last + 1) * self._block_size
        pieces: list[str] = []
        for name, begin, stop in _spans(request):
            begin, offset = max(begin, start), begin
            while begin < min(stop, end):
                boundary = (begin // self._block_size + 1) * self._block_size
                until = min(boundary, stop)
                pieces.append(f"{len(name)}:{name}:{begin - offset}:{until - offset}")
                if until == boundary:
                    yield "|".join(pieces).encode()
                    pieces.clear()
                begin = until


class ContentAhead:
    """Contents that take in the tokens after each block, as vLLM's do under `eagle`, whose head computes the KV of a
    token from the one that follows it (`num_hash_lookahead_tokens`, here 1)."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks = SegmentContent(block_size)
        self._tokens = SegmentContent(1)

    def blocks(self, request: Request, first: int, last: int) -> Iterator[bytes]:
        for index, block in enumerate(self._blocks.blocks(request, first, last), first + 1):
            end = index * self._block_size
            yield block + b"|" + b"".join(self._tokens.blocks(request, end, end))


def segment_content(config: SchedulerConfig) -> Content:
    """The contents that a simulated engine finds prefixes by."""
    if config.speculative is not None and config.speculative.num_hash_lookahead_tokens:
        return ContentAhead(config.block_size)
    return SegmentContent(config.block_size)


def _spans(request: Request) -> Iterator[tuple[str, int, int]]:
    """`(segment, begin, end)` over the sequence; private segments get a name nobody else can have."""
    begin = 0
    for number, (name, tokens) in enumerate(request.arrived.prompt):
        yield (name if name != PRIVATE else f"\0{request.id}.{number}"), begin, begin + tokens
        begin += tokens
    yield f"out:{request.id}", begin, request.max_len
