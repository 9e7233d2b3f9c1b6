"""What a scheduler asks of KV memory: fixed-size blocks, reference counts, and a cache of equal prefixes."""

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

    counts_only  nothing is shared: the order in which requests take blocks within a step cannot matter
    defers       what decodes fill is registered when it is looked for, so that steady steps need not be told of it
    total, free  blocks there are, and blocks nobody references (cached ones included)
    version      grows whenever a request that did not fit might fit now
    """

    counts_only: bool
    total: int
    version: int

    @property
    def free(self) -> int: ...

    @property
    def defers(self) -> bool: ...

    def settled(self, request: Request) -> bool:
        """Whether `version` tells whenever the hit of `request` has become longer."""
        ...

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


class CacheObserver(Protocol):
    """Who is told which blocks can be found."""

    def stored(self, request: Request, first: int, last: int) -> None:
        """The request's blocks from `first` up to but not including `last` can be found from now on."""
        ...

    def removed(self, block: int) -> None:
        """`block`, which could be found, cannot be found any more."""
        ...


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // block_size)
