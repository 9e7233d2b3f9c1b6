"""The protocol of KV memory for schedulers: fixed-size blocks, reference counts, and a prefix cache."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from tokentwin.serving.decode_set import DecodeSet
from tokentwin.serving.request import Request


class Hit(NamedTuple):
    """A prefix hit: the number of cached full blocks, and how many of them (`idle`) no request references now."""

    blocks: int
    idle: int


NO_HIT = Hit(0, 0)


class KvBlocks(Protocol):
    """The KV memory of one engine, without the null block.

    Attributes:
        counts_only: True if requests share nothing, so that the order in which they take blocks cannot matter
        defers: True if blocks that decodes fill are registered only when a prefix is looked up, not by decode steps
        total: number of all blocks
        free: number of blocks that no request references, including cached blocks
        version: number that grows whenever a request that did not fit might fit now
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
        """Return the longest cached prefix of `request`, of at most `known - 1` tokens."""
        ...

    def admit(self, request: Request, hit: Hit) -> None:
        """Take a reference to the blocks of `hit`."""
        ...

    def extend(self, request: Request, tokens: int) -> None:
        """Let the request hold blocks for its first `tokens` tokens. The caller has checked that enough are free."""
        ...

    def register(self, request: Request, tokens: int) -> None:
        """Let the full blocks of the first `tokens` tokens be found from now on; they are known and scheduled."""
        ...

    def forget(self, request: Request, tokens: int) -> None:
        """Undo `register` beyond the first `tokens` tokens, because the others will not be computed after all."""
        ...

    def extend_decodes(self, decodes: DecodeSet, lag: int) -> None:
        """Do for every member, before the set's tick, what `extend` by one token and `register` would do.

        `lag` is the number of steps in flight. It is also the number of a member's computed tokens that are not known
        yet.
        """
        ...

    def take_for(self, decodes: DecodeSet, steps: int, lag: int) -> None:
        """Do what `extend_decodes` would do before each of `steps` ticks in a row."""
        ...

    def net_blocks(self, decodes: DecodeSet, steps: int) -> int:
        """Return the decrease of `free` in `steps` ticks of the set."""
        ...

    def register_decodes(self, decodes: DecodeSet, lag: int) -> None:
        """Do, after a tick, what `register` would do for all but the last `lag` computed tokens of every member."""
        ...

    def release(self, request: Request, may_return: bool = False) -> None:
        """Drop all references of the request. With `may_return` the request itself can find its blocks later."""
        ...


class CacheObserver(Protocol):
    """An observer that is told which blocks can be found."""

    def stored(self, request: Request, first: int, last: int) -> None:
        """Record that the request's blocks `first` to `last - 1` can be found from now on."""
        ...

    def removed(self, block: int) -> None:
        """Record that the block with id `block` cannot be found any more."""
        ...


def blocks_for(tokens: int, block_size: int) -> int:
    """Return how many blocks hold `tokens` tokens."""
    return -(-tokens // block_size)
