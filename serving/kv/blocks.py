"""What a scheduler asks of KV memory: fixed-size blocks, reference counts, and a cache of equal prefixes.

Two implementations decide the same: `BlockPool` keeps every block's identity, as an engine needs;
`CountingPool` keeps counts, when no request can reuse another's tokens (a property test holds them equal).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from serving.decode_set import DecodeSet
from serving.request import Request


class Hit(NamedTuple):
    """Full blocks at the start of a request that are in the cache; `idle` of them nobody references now."""

    blocks: int
    idle: int


NO_HIT = Hit(0, 0)


class KvBlocks(Protocol):
    """KV memory of one engine, without the null block.

    counts_only  no identities: the order in which requests take blocks within a step cannot matter
    total, free  blocks there are, and blocks nobody references (cached ones included)
    version      grows whenever a request that did not fit might fit now
    """

    counts_only: bool
    total: int
    version: int

    @property
    def free(self) -> int: ...

    def lookup(self, request: Request) -> Hit:
        """The longest cached prefix of `request`, at most `known - 1` tokens."""
        ...

    def admit(self, request: Request, hit: Hit) -> None:
        """Reference the blocks of `hit`."""
        ...

    def extend(self, request: Request, tokens: int) -> None:
        """Hold blocks for `tokens` tokens. The caller has checked that they are free."""
        ...

    def register(self, request: Request, tokens: int) -> None:
        """The first `tokens` tokens are known and scheduled: their full blocks can be found from now on."""
        ...

    def forget(self, request: Request, tokens: int) -> None:
        """Undo `register` beyond the first `tokens` tokens: the rest will not be computed after all."""
        ...

    def extend_decodes(self, decodes: DecodeSet, lag: int) -> None:
        """`extend` by one token and `register`, for every member, before the set's tick.

        `lag` is the number of steps in flight: that many of a member's computed tokens are not yet known.
        """
        ...

    def take_for(self, decodes: DecodeSet, steps: int, lag: int) -> None:
        """`extend_decodes` before each of `steps` ticks in a row."""
        ...

    def ahead(self, decodes: DecodeSet, steps: int) -> int:
        """By how much `free` will shrink in `steps` ticks of the set."""
        ...

    def register_decodes(self, decodes: DecodeSet, lag: int) -> None:
        """`register` all but the last `lag` computed tokens of every member, after a tick."""
        ...

    def release(self, request: Request, may_return: bool = False) -> None:
        """Drop all of the request's references; `may_return` keeps its blocks findable by itself."""
        ...


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // block_size)
