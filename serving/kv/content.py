"""The content of sequences, by which equal prefixes are found: spans of named tokens, or a key for each KV block.

The key of block i is H(key of block i-1, content of block i), so a key identifies a whole prefix. Only full blocks have
keys.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Protocol

from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.request import Request
from tokentwin.serving.workload import PRIVATE, Span

ROOT = b""


class Spans(Protocol):
    """A source of the names of tokens.

    Attributes:
        lookahead: number of tokens after a block that count as its content, beyond those in the names of spans
    """

    @property
    def lookahead(self) -> int: ...

    def spans(self, request: Request) -> Sequence[Span]:
        """Return spans `(name, begin, end)` that cover the sequence, or its full blocks; no span is empty.

        Two tokens are equal if and only if they have the same position in spans with the same name.
        """
        ...

    def opening(self, request: Request, tokens: int) -> Hashable:
        """Return a value that two requests share if and only if their first `tokens` tokens are equal."""
        ...


class Content(Spans, Protocol):
    """A source of the contents of blocks: segments in the simulator, token ids in a real engine."""

    def blocks(self, request: Request, first: int, last: int) -> Iterable[bytes]:
        """Return a canonical form of the tokens of each of the full blocks `first` to `last`, including `last`."""
        ...


def block_keys(request: Request, count: int, content: Content) -> list[bytes]:
    """Return the chained keys of at least the first `count` blocks. The request keeps computed keys."""
    keys = request.keys
    if len(keys) < count:
        parent = keys[-1] if keys else ROOT
        for block in content.blocks(request, len(keys), count - 1):
            parent = blake2b(parent + block, digest_size=16).digest()
            keys.append(parent)
    return keys


class SegmentContent:
    """The contents of a request from the segments of its prompt; the output of request r is segment `out:r`."""

    lookahead = 0

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def spans(self, request: Request) -> Sequence[Span]:
        spans = request.spans
        if not spans:
            spans += (span for span in _spans(request) if span[1] < span[2])
        return spans

    def opening(self, request: Request, tokens: int) -> Hashable:
        opening = []
        for name, begin, end in self.spans(request):
            opening.append((name, begin, min(end, tokens)))
            if end >= tokens:
                break
        return tuple(opening)

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


class ContentAhead(SegmentContent):
    """Contents that include the token after each block, as in vLLM with `eagle`.

    The head of `eagle` computes the KV of a token from the token that follows it (`num_hash_lookahead_tokens`, here 1).
    """

    lookahead = 1

    def blocks(self, request: Request, first: int, last: int) -> Iterator[bytes]:
        tokens = SegmentContent(1)
        for index, block in enumerate(super().blocks(request, first, last), first + 1):
            end = index * self._block_size
            yield block + b"|" + b"".join(tokens.blocks(request, end, end))


class OwnContent:
    """Spans with a name of the request's own, so that it finds only its own blocks."""

    lookahead = 0

    def spans(self, request: Request) -> Sequence[Span]:
        return ((request.id, 0, request.max_len),)

    def opening(self, request: Request, tokens: int) -> Hashable:
        return request.id


def segment_content(config: SchedulerConfig) -> SegmentContent:
    """Return the content source by which a simulated engine finds prefixes."""
    if config.speculative is not None and config.speculative.num_hash_lookahead_tokens:
        return ContentAhead(config.block_size)
    return SegmentContent(config.block_size)


def _spans(request: Request) -> Iterator[tuple[str, int, int]]:
    """Yield `(segment, begin, end)` over the sequence; a private segment gets a name that no other request can have.

    An adapter renames the first segment, so that requests with other adapters find no prefix.
    """
    begin, arrived = 0, request.arrived
    adapter = arrived.adapter
    for number, (name, tokens) in enumerate(arrived.content if arrived.items else arrived.prompt):
        if name == PRIVATE:
            name = f"\0{request.id}.{number}"
        elif adapter and not number:
            name = f"\0adapter {adapter}: {name}"
        yield name, begin, begin + tokens
        begin += tokens
    yield f"out:{request.id}", begin, request.max_len


class Tokens(Protocol):
    """The known token ids of one request, prompt and output; only requests with the same salt share blocks."""

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def salt(self) -> str: ...


class TokenContent:
    """The contents of a request's blocks from its token ids; `sequences` maps the request's id to them.

    The first block also has the name of the adapter and the salt, so that requests with others find no prefix.
    """

    lookahead = 0

    def __init__(self, sequences: Mapping[int, Tokens], block_size: int) -> None:
        self._sequences = sequences
        self._block_size = block_size

    def spans(self, request: Request) -> Sequence[Span]:
        spans, size = request.spans, self._block_size
        for block in self.blocks(request, len(spans), request.known // size - 1):
            spans.append((block, len(spans) * size, (len(spans) + 1) * size))
        return spans

    def opening(self, request: Request, tokens: int) -> Hashable:
        sequence = self._sequences[request.id]
        return request.arrived.adapter, sequence.salt, *sequence.tokens[:tokens]

    def blocks(self, request: Request, first: int, last: int) -> Iterator[bytes]:
        sequence, adapter = self._sequences[request.id], request.arrived.adapter
        tokens, owner = sequence.tokens, f"{adapter}\0{sequence.salt}" if sequence.salt else adapter
        for index in range(first, last + 1):
            block = array("q", tokens[index * self._block_size : (index + 1) * self._block_size]).tobytes()
            yield block if index or not owner else block + owner.encode()
