"""Slower memory behind the KV blocks of a replica, on the virtual clock.

Full blocks are written to the first tier when the step that filled them has ended, as vLLM's offloading connector
does, and move down as newer ones come. Waiting requests load what they find instead of computing it. Each tier has a
link for either direction; a block that is still being written can be loaded once it is there.
"""

from __future__ import annotations

from collections.abc import Sequence

from serving.deployments.config import Deployment
from serving.deployments.kv_bytes import kv_bytes_per_token
from serving.deployments.kv_tiers import KvTiersConfig
from serving.errors import UserError
from serving.kv.content import SegmentContent, block_keys
from serving.kv.tiered_cache import TieredCache
from serving.request import Request
from serving.step_plan import StepPlan
from sim.clock import TRANSFER_ENDS, Alarm, VirtualClock
from sim.fifo_link import FifoLink
from sim.replica import Replica
from sim.run_log import RunLog

_GIB = 1024**3


class TieredKv:
    """The tiers of one replica. Raises UserError where a tier holds no block."""

    def __init__(self, clock: VirtualClock, log: RunLog, replica: Replica, deployment: Deployment) -> None:
        config = deployment.kv_tiers
        assert config is not None
        self._clock = clock
        self._log = log
        self._replica = replica
        self._names = [tier.name for tier in config.tiers]
        self._swaps = config.preemption == "swap"
        self._block_size = deployment.scheduler.block_size
        self._content = SegmentContent(self._block_size)
        per_token = kv_bytes_per_token(deployment, config.kv_bytes_per_token, "kv_tiers.kv_bytes_per_token")
        self._block_bytes = per_token * self._block_size
        self._cache = TieredCache(_capacities(config, self._block_bytes))
        self._reads = [FifoLink(tier.read_gb_s * 1e9, round(tier.latency_us * 1000)) for tier in config.tiers]
        self._writes = [FifoLink(tier.write_gb_s * 1e9, round(tier.latency_us * 1000)) for tier in config.tiers]
        self._there_ns: dict[bytes, int] = {}  # when what lies in a tier has been written to it

    # What the scheduler asks

    def matched(self, request: Request, found: int) -> int:
        if request.preemptions and not self._swaps:
            return 0
        most = (request.known - 1) // self._block_size
        keys = block_keys(request, most, self._content)
        first = last = found // self._block_size
        while last < most and keys[last] in self._there_ns:
            last += 1
        return (last - first) * self._block_size

    def load(self, request: Request, start: int, tokens: int) -> None:
        now = self._clock.now_ns
        keys = request.keys[start // self._block_size : (start + tokens) // self._block_size]
        ends_ns = now
        for number, name in enumerate(self._names):
            here = [key for key in keys if self._cache.tier(key) == number]
            if here:
                ready_ns = max(now, *(self._there_ns[key] for key in here))
                ends_ns = max(ends_ns, self._reads[number].send(len(here) * self._block_bytes, ready_ns))
                self._log.loads(request, name, len(here) * self._block_size)
        self._use(keys)
        Alarm(self._clock, ends_ns, TRANSFER_ENDS, lambda _: self._replica.loaded(request))

    def admitted(self, request: Request) -> None:
        """What it found counts as used when it ends."""

    def keeps(self, request: Request) -> bool:
        """What is still to be written stays until it is."""
        now = self._clock.now_ns
        written_ns = self._store(request, 0, request.computed // self._block_size, now)
        if written_ns <= now:
            return False
        Alarm(self._clock, written_ns, TRANSFER_ENDS, lambda _: self._replica.release(request))
        return True

    # What the replica tells

    def planned(self, plan: StepPlan, end_ns: int) -> None:
        """`plan` runs until `end_ns`; what it fills is written then."""
        for request in plan.preempted:
            self._use([key for key in request.keys if key in self._there_ns])
        for request, start, tokens, *_ in plan.listed:
            self._store(request, start // self._block_size, (start + tokens) // self._block_size, end_ns)
        for request in plan.decodes.crossing().values():
            full = request.computed // self._block_size
            self._store(request, full - 1, full, end_ns)

    def _store(self, request: Request, first: int, last: int, ready_ns: int) -> int:
        """Blocks from `first` up to but not including `last` are used; those in no tier are written to the first.

        When all of them have been written.
        """
        keys = block_keys(request, last, self._content)[first:last]
        missing = [key for key in keys if key not in self._there_ns]
        if missing:
            there_ns = self._writes[0].send(len(missing) * self._block_bytes, ready_ns)
            self._there_ns.update(dict.fromkeys(missing, there_ns))
        written_ns = max((self._there_ns[key] for key in keys), default=0)
        self._use(keys)
        return written_ns

    def _use(self, keys: Sequence[bytes]) -> None:
        """Blocks of a prefix are used, the last of them first: it is a prefix's end that is to be lost first."""
        pushed: dict[bytes, int] = {}
        for used in reversed(keys):
            pushed.pop(used, None)
            pushed.update(self._cache.use(used))
        for number, link in enumerate(self._writes):
            down = [key for key, tier in pushed.items() if tier == number]
            if down:
                ready_ns = max(self._clock.now_ns, *(self._there_ns[key] for key in down))
                there_ns = link.send(len(down) * self._block_bytes, ready_ns)
                self._there_ns.update(dict.fromkeys(down, there_ns))
        for key, tier in pushed.items():
            if tier == len(self._writes):
                del self._there_ns[key]

    def check(self) -> None:
        """Raise AssertionError unless tiers keep to their capacities and what is there is known."""
        self._cache.check()
        assert all(self._cache.tier(key) is not None for key in self._there_ns)
        assert len(self._cache) == len(self._there_ns)


def add_tiers(clock: VirtualClock, log: RunLog, replica: Replica, deployment: Deployment) -> None:
    """Put the deployment's tiers behind `replica`. Raises UserError if its policy can load no KV."""
    tiers = TieredKv(clock, log, replica, deployment)
    replica.connect(tiers)
    log.tiered(replica.index)
    replica.on_planned = tiers.planned


def _capacities(config: KvTiersConfig, block_bytes: int) -> list[int]:
    """Blocks that each tier holds."""
    blocks = [int(tier.capacity_gib * _GIB) // block_bytes for tier in config.tiers]
    for number, tier in enumerate(config.tiers):
        if not blocks[number]:
            remedy = f"is smaller than one KV block of {block_bytes} bytes; raise it, or leave the tier out"
            raise UserError(f"kv_tiers.tiers.{number}.capacity_gib", tier.capacity_gib, remedy)
    return blocks
