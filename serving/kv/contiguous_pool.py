"""KV memory as before paging: at admission each request reserves one run of blocks for its maximum length.

The run is the first free run, from the lowest block on, that is long enough (first fit; Knuth, "The Art of Computer
Programming", 2.5). Blocks that a request reserves and never fills are internal fragmentation. Free blocks in runs that
are too short for the next request are external fragmentation. Such reservations are the baselines of Kwon et al.,
"Efficient Memory Management for Large Language Model Serving with PagedAttention" (SOSP 2023).
"""

from __future__ import annotations

from tokentwin.serving.decode_set import DecodeSet
from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.kv.blocks import NO_HIT, Hit, KvBlocks, blocks_for
from tokentwin.serving.request import Request


class ContiguousPool:
    """A pool of `config.num_blocks - 1` blocks; requests reserve runs of blocks as `config.kv_reservation` says.

    Runs are not shared and do not grow. With `names`, requests get the ids of their blocks, which a real engine needs.
    """

    counts_only = defers = True

    def __init__(self, config: SchedulerConfig, names: bool) -> None:
        self.block_size = config.block_size
        self.total = self.free = config.num_blocks - 1
        self.version = 0
        self._most_tokens = config.max_model_len
        self._whole = config.kv_reservation == "max_model_len"
        self._max_tokens = config.kv_reserved_max_tokens
        self._names = names
        self._runs = [(1, self.total)]  # free runs in order: first block and number of blocks
        self._reserved: dict[int, tuple[int, int]] = {}  # the run of each request, by its id

    def reserved(self, request: Request) -> int:
        """Return how many blocks `request` takes at its admission."""
        tokens = self._most_tokens
        if not self._whole:
            tokens = min(tokens, max(request.max_len, request.prompt_len + self._max_tokens))
        return blocks_for(tokens, self.block_size)

    @property
    def longest(self) -> int:
        """The number of blocks of the longest free run."""
        return max((blocks for _, blocks in self._runs), default=0)

    def settled(self, request: Request) -> bool:
        return True

    def lookup(self, request: Request) -> Hit:
        return NO_HIT

    def admit(self, request: Request, hit: Hit) -> None:
        need = self.reserved(request)
        at, (first, blocks) = next((at, run) for at, run in enumerate(self._runs) if run[1] >= need)
        self._runs[at : at + 1] = [(first + need, blocks - need)] if blocks > need else []
        self._reserved[request.id] = first, need
        self.free -= need
        request.block_count = need
        if self._names:
            request.blocks.extend(range(first, first + need))

    def extend(self, request: Request, tokens: int) -> None:
        """Do nothing, because the request has its blocks already."""

    def register(self, request: Request, tokens: int) -> None:
        """Do nothing, because there is no prefix cache."""

    forget = register

    def extend_decodes(self, decodes: DecodeSet, lag: int) -> None:
        decodes.lag = lag

    register_decodes = extend_decodes

    def take_for(self, decodes: DecodeSet, steps: int, lag: int) -> None:
        decodes.lag = lag

    def net_blocks(self, decodes: DecodeSet, steps: int) -> int:
        return 0

    def release(self, request: Request, may_return: bool = False) -> None:
        run = self._reserved.pop(request.id, None)
        if run is not None:
            self.free += run[1]
            joined: list[tuple[int, int]] = []
            for first, blocks in sorted([*self._runs, run]):
                if joined and sum(joined[-1]) == first:
                    joined[-1] = joined[-1][0], joined[-1][1] + blocks
                else:
                    joined.append((first, blocks))
            self._runs = joined
        request.blocks.clear()
        request.block_count = request.hashed = 0
        self.version += 1


def longest_free(pool: KvBlocks) -> int | None:
    """Return the number of blocks of the longest free run of `pool`; None if requests do not need runs."""
    return pool.longest if isinstance(pool, ContiguousPool) else None
