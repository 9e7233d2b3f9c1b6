"""KV blocks in slower memory, on either clock: which are found, written, moved down and lost.

Full blocks are written to the first tier when the step that filled them has ended, as vLLM's offloading connector does,
and move down as newer ones come. The subclass decides what a transfer is, and how long it takes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from serving.deployments.config import SchedulerConfig
from serving.deployments.kv_tiers import KvTiersConfig
from serving.errors import UserError
from serving.kv.content import Content, block_keys
from serving.request import Request
from serving.step_plan import StepPlan


class TieredCache:
    """The keys of blocks in tiers of `capacities` blocks each."""

    def __init__(self, capacities: Sequence[int]) -> None:
        self._capacities = tuple(capacities)
        self._tiers: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in capacities]  # the last used last

    def tier(self, key: bytes) -> int | None:
        """Return the number of the tier in which `key` lies; None if it is in none."""
        for number, keys in enumerate(self._tiers):
            if key in keys:
                return number
        return None

    def use(self, key: bytes) -> list[tuple[bytes, int]]:
        """Put `key` first; return keys that were pushed down for it, each with its new tier (past the last: gone)."""
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
        """Raise AssertionError unless every tier keeps to its capacity and no key is in two."""
        for keys, capacity in zip(self._tiers, self._capacities, strict=True):
            assert len(keys) <= capacity
        assert len({key for keys in self._tiers for key in keys}) == len(self)


_GIB = 1024**3


class Filling(NamedTuple):
    """The use of the tiers by a step: requests preempted for it, and spans of blocks that it fills.

    A span is `(request, first, last)`.
    """

    preempted: list[Request]
    spans: list[tuple[Request, int, int]]


class TieredBlocks:
    """The blocks of `block_bytes` in `tiers`, behind a scheduler of `config`. Raises UserError if a tier holds none."""

    synchronous: ClassVar[bool] = False

    def __init__(self, tiers: KvTiersConfig, block_bytes: int, config: SchedulerConfig, content: Content) -> None:
        self.block_size = config.block_size
        drafts = config.speculative
        self._drafts_ahead = 2 * (drafts.num_speculative_tokens + 1) if drafts else 0  # two steps: see `filling`
        self.cache = TieredCache(tier_blocks(tiers, block_bytes))
        self._swaps = tiers.preemption == "swap"
        self._content = content

    def has(self, key: bytes) -> bool:
        """Return whether a block lies in a tier, or is on its way there."""
        return self.cache.tier(key) is not None

    def matched(self, request: Request, cached: int) -> int:
        """Return the tokens that can be loaded, as `serving.kv.external.ExternalKv` says."""
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
        """Use and write the blocks of `plan`, the last made, which runs until `end_ns`; they are written then."""
        self.fill(self.filling(plan), end_ns)

    def filling(self, plan: StepPlan) -> Filling:
        """Return the requests and blocks that `plan`, the last made, uses and fills.

        Drafts may be rejected: then a block is filled when all of its tokens are known, before which a step may be
        planned. vLLM's connector counts blocks in this way.
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
        """Use the blocks of `filling`, whose step runs until `end_ns`, and write new ones then."""
        for request in filling.preempted:
            self._use([key for key in request.keys if self.has(key)])
        for request, first, last in filling.spans:
            self._store(request, first, last, end_ns)

    def _store(self, request: Request, first: int, last: int, ready_ns: int) -> int:
        """Use the blocks from `first` to before `last`, and write blocks in no tier to the first tier.

        Returns when all of them have been written, in the form of `_written`.
        """
        keys = block_keys(request, last, self._content)[first:last]
        missing = [at for at, key in enumerate(keys) if not self.has(key)]
        if missing:
            self._write(request, [(first + at, keys[at]) for at in missing], ready_ns)
        written = self._written(keys)
        self._use(keys)
        return written

    def _store_all(self, request: Request, ready_ns: int) -> int:
        """Use and write all blocks of a request that has ended, as `_store` does."""
        return self._store(request, 0, min(request.computed, request.known) // self.block_size, ready_ns)

    def _use(self, keys: Sequence[bytes]) -> None:
        """Use blocks of a prefix, the last of them first: a prefix's end is to be lost first."""
        pushed: dict[bytes, int] = {}
        for used in reversed(keys):
            pushed.pop(used, None)
            pushed.update(self.cache.use(used))
        self._moved(pushed)

    def _write(self, request: Request, missing: Sequence[tuple[int, bytes]], ready_ns: int) -> None:
        """Begin to write blocks of a request, by their places and keys, to the first tier once they are ready."""
        raise NotImplementedError

    def _written(self, keys: Sequence[bytes]) -> int:
        """Return when the last of these blocks, which all lie in tiers, has been or will have been written."""
        raise NotImplementedError

    def _moved(self, pushed: dict[bytes, int]) -> None:
        """Move blocks down, each to the tier given for it; past the last tier they are lost."""
        raise NotImplementedError


def tier_blocks(config: KvTiersConfig, block_bytes: int) -> list[int]:
    """Return how many blocks each tier holds. Raises UserError if a tier holds none."""
    blocks = [int(tier.capacity_gib * _GIB) // block_bytes for tier in config.tiers]
    for number, tier in enumerate(config.tiers):
        if not blocks[number]:
            remedy = f"is smaller than one KV block of {block_bytes} bytes; raise it, or leave the tier out"
            raise UserError(f"kv_tiers.tiers.{number}.capacity_gib", tier.capacity_gib, remedy)
    return blocks
