"""KV blocks in tiers of slower memory, for the engine and the simulator: which are found, written, moved and lost.

Full blocks are written to the first tier when the step that filled them has ended, as in vLLM's offloading connector.
They move down to slower tiers as newer blocks come. A subclass implements the transfers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.deployments.kv_tiers import KvTiersConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.kv.content import Content, block_keys
from tokentwin.serving.request import Request
from tokentwin.serving.step_plan import StepPlan


class TieredCache:
    """The keys of the blocks in each tier. `capacities` are the numbers of blocks that the tiers hold."""

    def __init__(self, capacities: Sequence[int]) -> None:
        self._capacities = tuple(capacities)
        self._tiers: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in capacities]  # in order of last use

    def tier(self, key: bytes) -> int | None:
        """Return the index of the tier that holds `key`; None if no tier does."""
        for number, keys in enumerate(self._tiers):
            if key in keys:
                return number
        return None

    def use(self, key: bytes) -> list[tuple[bytes, int]]:
        """Move `key` into the first tier; return the keys that this pushes down, each with the index of its new tier.

        A key whose new index is beyond the last tier is lost.
        """
        first = self._tiers[0]
        if key in first:
            first.move_to_end(key)
            return []
        for keys in self._tiers[1:]:
            if key in keys:
                del keys[key]
                break
        pushed = []
        for number, keys in enumerate(self._tiers):
            keys[key] = None
            if len(keys) <= self._capacities[number]:
                break
            key, _ = keys.popitem(last=False)
            pushed.append((key, number + 1))
        return pushed

    def __len__(self) -> int:
        return sum(map(len, self._tiers))

    def check(self) -> None:
        """Raise AssertionError if a tier holds more than its capacity, or a key is in two tiers."""
        for keys, capacity in zip(self._tiers, self._capacities, strict=True):
            assert len(keys) <= capacity
        assert len({key for keys in self._tiers for key in keys}) == len(self)


_GIB = 1024**3


class Filling(NamedTuple):
    """What a step does with the tiers: the requests that it preempts, and the spans of blocks that it fills.

    A span `(request, first, last)` is the blocks `first` to `last - 1` of the request.
    """

    preempted: list[Request]
    spans: list[tuple[Request, int, int]]


class TieredBlocks:
    """The KV blocks of one engine in `tiers`. Raises UserError if a tier is too small for a block of `block_bytes`."""

    synchronous: ClassVar[bool] = False

    def __init__(self, tiers: KvTiersConfig, block_bytes: int, config: SchedulerConfig, content: Content) -> None:
        self.block_size = config.block_size
        drafts = config.speculative
        # maximum number of sampled tokens of two steps, which `filling` has to consider
        self._drafts_ahead = 2 * (drafts.num_speculative_tokens + 1) if drafts else 0
        self.cache = TieredCache(tier_blocks(tiers, block_bytes))
        self._swaps = tiers.preemption == "swap"
        self._content = content

    def has(self, key: bytes) -> bool:
        """Return whether the block with this key is in a tier or is being written to one."""
        return self.cache.tier(key) is not None

    def matched(self, request: Request, cached: int) -> int:
        """Return how many tokens can be loaded, as `tokentwin.serving.kv.external.ExternalKv` defines it."""
        if request.preemptions and not self._swaps:
            return 0
        most = (request.known - 1) // self.block_size
        keys = block_keys(request, most, self._content)
        first = last = cached // self.block_size
        while last < most and self.has(keys[last]):
            last += 1
        return (last - first) * self.block_size

    def loaded_keys(self, request: Request, start: int, tokens: int) -> list[bytes]:
        """Return the keys of the blocks that hold `tokens` tokens from `start` on."""
        return request.keys[start // self.block_size : (start + tokens) // self.block_size]

    def planned(self, plan: StepPlan, end_ns: int) -> None:
        """Use the blocks of `plan`, the last plan made, and begin to write the new ones when it ends at `end_ns`."""
        self.fill(self.filling(plan), end_ns)

    def filling(self, plan: StepPlan) -> Filling:
        """Return the requests and blocks that `plan`, the last plan made, uses and fills.

        With drafts, which may be rejected, a block counts as filled only when all its tokens are known. Later steps may
        be planned before that. vLLM's connector counts blocks in this way.
        """
        size = self.block_size
        if self._drafts_ahead:
            spans = []
            for request, start, tokens, *_ in plan.listed:
                known = request.known
                first = max(min(start, known) - self._drafts_ahead, 0)
                spans.append((request, first // size, min(start + tokens, known) // size))
        else:
            spans = [(request, start // size, (start + tokens) // size) for request, start, tokens, *_ in plan.listed]
        for request in plan.decodes.at_block_start().values():
            full = request.computed // size
            spans.append((request, full - 1, full))
        return Filling(list(plan.preempted), spans)

    def fill(self, filling: Filling, end_ns: int) -> None:
        """Use the blocks of `filling`, and begin to write the new ones when their step ends at `end_ns`."""
        for request in filling.preempted:
            self._use([key for key in request.keys if self.has(key)])
        for request, first, last in filling.spans:
            self._store(request, first, last, end_ns)

    def _store(self, request: Request, first: int, last: int, ready_ns: int) -> int:
        """Use the blocks `first` to `last - 1`, and write those that are in no tier to the first tier.

        Returns the time at which all of them are written, as `_written` does.
        """
        keys = block_keys(request, last, self._content)[first:last]
        missing = [at for at, key in enumerate(keys) if not self.has(key)]
        if missing:
            self._write(request, [(first + at, keys[at]) for at in missing], ready_ns)
        written = self._written(keys)
        self._use(keys)
        return written

    def _store_all(self, request: Request, ready_ns: int) -> int:
        """Use and write all full blocks of a request that has ended, as `_store` does."""
        return self._store(request, 0, min(request.computed, request.known) // self.block_size, ready_ns)

    def _use(self, keys: Sequence[bytes]) -> None:
        """Use the blocks of a prefix from the last to the first, so that the end of a prefix is lost first."""
        pushed: dict[bytes, int] = {}
        for used in reversed(keys):
            pushed.pop(used, None)
            pushed.update(self.cache.use(used))
        self._moved(pushed)

    def _write(self, request: Request, missing: Sequence[tuple[int, bytes]], ready_ns: int) -> None:
        """Begin to write the blocks `missing`, as (index, key), of `request` to the first tier at `ready_ns`."""
        raise NotImplementedError

    def _written(self, keys: Sequence[bytes]) -> int:
        """Return the time at which the last of these blocks was or will be written; all are in tiers."""
        raise NotImplementedError

    def _moved(self, pushed: dict[bytes, int]) -> None:
        """Move each block to the tier with the given index; blocks with an index beyond the last tier are lost."""
        raise NotImplementedError


def tier_blocks(config: KvTiersConfig, block_bytes: int) -> list[int]:
    """Return how many blocks each tier holds. Raises UserError if a tier holds none."""
    blocks = [int(tier.capacity_gib * _GIB) // block_bytes for tier in config.tiers]
    for number, tier in enumerate(config.tiers):
        if not blocks[number]:
            remedy = f"is smaller than one KV block of {block_bytes} bytes; raise it, or leave the tier out"
            raise UserError(f"kv_tiers.tiers.{number}.capacity_gib", tier.capacity_gib, remedy)
    return blocks
