"""The protocol of KV memory for schedulers: fixed-size blocks, reference counts, and a cache of equal prefixes."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from serving.decode_set import DecodeSet
from serving.request import Request


class Hit(NamedTuple):
    """The full blocks at the start of a request that are in the cache; no request references `idle` of them now."""

    blocks: int
    idle: int


NO_HIT = Hit(0, 0)


class KvBlocks(Protocol):
    """The KV memory of one engine, without the null block.

    Attributes:
        counts_only: nothing is shared: the order in which requests take blocks within a step cannot matter
        defers: blocks that decodes fill are registered when a prefix is looked for, so steady steps need not do it
        total, free: number of all blocks, and of blocks that no request references (cached ones included)
        version: grows whenever a request that did not fit might fit now
    """

    counts_only: bool
    total: int
    version: int

    @property
    def free(self) -> int: ...

    @property
    def defers(self) -> bool: ...

    def settled(self, request: Request) -> bool:
        """Return whether `version` grows whenever the hit of `request` becomes longer."""
        ...

    def lookup(self, request: Request) -> Hit:
        """Return the longest cached prefix of `request`, at most `known - 1` tokens."""
        ...

    def admit(self, request: Request, hit: Hit) -> None:
        """Take a reference to the blocks of `hit`."""
        ...

    def extend(self, request: Request, tokens: int) -> None:
        """Hold blocks for `tokens` tokens. The caller has checked that they are free."""
        ...

    def register(self, request: Request, tokens: int) -> None:
        """Make the full blocks of the first `tokens` tokens findable; the tokens are known and scheduled."""
        ...

    def forget(self, request: Request, tokens: int) -> None:
        """Undo `register` beyond the first `tokens` tokens: the rest will not be computed after all."""
        ...

    def extend_decodes(self, decodes: DecodeSet, lag: int) -> None:
        """Call `extend` by one token and `register`, for every member, before the set's tick.

        `lag` is the number of steps in flight: that many of a member's computed tokens are not yet known.
        """
        ...

    def take_for(self, decodes: DecodeSet, steps: int, lag: int) -> None:
        """Call `extend_decodes` before each of `steps` ticks in a row."""
        ...

    def net_blocks(self, decodes: DecodeSet, steps: int) -> int:
        """Return by how much `free` will shrink in `steps` ticks of the set."""
        ...

    def register_decodes(self, decodes: DecodeSet, lag: int) -> None:
        """Call `register` for all but the last `lag` computed tokens of every member, after a tick."""
        ...

    def release(self, request: Request, may_return: bool = False) -> None:
        """Drop all of the request's references; `may_return` keeps its blocks findable for the request itself."""
        ...


class CacheObserver(Protocol):
    """An observer that hears which blocks can be found."""

    def stored(self, request: Request, first: int, last: int) -> None:
        """Record that the request's blocks from `first` to before `last` can be found from now on."""
        ...

    def removed(self, block: int) -> None:
        """Record that `block`, which could be found, cannot be found any more."""
        ...


def blocks_for(tokens: int, block_size: int) -> int:
    """Return how many blocks hold `tokens` tokens."""
    return -(-tokens // block_size)
