"""KV tiers of a replica on the virtual clock: slower memory for its KV blocks.

The rules are those of `tokentwin.serving.kv.tiered_blocks`. Waiting requests load the blocks that they find instead of
computing them. Each tier has one link for reads and one for writes, which carry one transfer after another. A load of a
block that is still being written waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from simpy.events import ProcessGenerator

from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.kv_layout import kv_bytes_per_token
from tokentwin.serving.kv.content import segment_content
from tokentwin.serving.kv.tiered_blocks import TieredBlocks
from tokentwin.serving.request import Request
from tokentwin.sim.clock import SECOND_NS, TRANSFER_ENDS, VirtualClock
from tokentwin.sim.replica import Replica
from tokentwin.sim.run_log import RunLog


class FifoLink:
    """A link that carries one transfer at a time at `bytes_per_s`. Each transfer arrives `latency_ns` later."""

    def __init__(self, bytes_per_s: float, latency_ns: int) -> None:
        self._bytes_per_s = round(bytes_per_s)
        self._latency_ns = latency_ns
        self._free_ns = 0

    def send(self, size: int, ready_ns: int) -> int:
        """Return the time at which `size` bytes that can leave at `ready_ns` arrive.

        The next transfer can begin during the latency of this one.
        """
        begins_ns = max(self._free_ns, ready_ns)
        self._free_ns = begins_ns - (-size * SECOND_NS // self._bytes_per_s)
        return self._free_ns + self._latency_ns


class TieredKv(TieredBlocks):
    """The tiers of one replica. Raises UserError if a tier holds no block."""

    def __init__(self, clock: VirtualClock, log: RunLog, replica: Replica, deployment: Deployment) -> None:
        config, scheduler = deployment.kv_tiers, deployment.scheduler
        assert config is not None
        per_token = kv_bytes_per_token(deployment, config.kv_bytes_per_token, "kv_tiers.kv_bytes_per_token")
        self._block_bytes = per_token * scheduler.block_size
        super().__init__(config, self._block_bytes, scheduler, segment_content(scheduler))
        self._clock = clock
        self._log = log
        self._replica = replica
        self._names = [tier.name for tier in config.tiers]
        self._reads = [FifoLink(tier.read_gb_s * 1e9, round(tier.latency_us * 1000)) for tier in config.tiers]
        self._writes = [FifoLink(tier.write_gb_s * 1e9, round(tier.latency_us * 1000)) for tier in config.tiers]
        self._there_ns: dict[bytes, int] = {}  # by key: time at which the block is written to its tier

    def has(self, key: bytes) -> bool:
        return key in self._there_ns

    # Called by the scheduler

    def load(self, request: Request, start: int, tokens: int) -> None:
        now = self._clock.now_ns
        keys = self.loaded_keys(request, start, tokens)
        ends_ns = now
        for number, name in enumerate(self._names):
            here = [key for key in keys if self.cache.tier(key) == number]
            if here:
                ready_ns = max(now, *(self._there_ns[key] for key in here))
                ends_ns = max(ends_ns, self._reads[number].send(len(here) * self._block_bytes, ready_ns))
                self._log.loads(request, name, len(here) * self.block_size)
        self._use(keys)
        self._loads_until(request, ends_ns)

    def _loads_until(self, request: Request, ends_ns: int) -> None:
        self._clock.start(self._load(request, ends_ns))

    def _load(self, request: Request, ends_ns: int) -> ProcessGenerator:
        yield self._clock.until(ends_ns, TRANSFER_ENDS)
        self._replica.loaded(request)

    def admitted(self, request: Request) -> None:
        """Do nothing, because the request's blocks count as used when it ends."""

    def keeps(self, request: Request) -> bool:
        """Keep the request's blocks until all are written to the tiers; return whether some are not written yet."""
        return self._keeps_until(request, self._store_all(request, self._clock.now_ns))

    def _keeps_until(self, request: Request, written_ns: int) -> bool:
        if written_ns <= self._clock.now_ns:
            return False
        self._clock.start(self._keep(request, written_ns))
        return True

    def _keep(self, request: Request, written_ns: int) -> ProcessGenerator:
        yield self._clock.until(written_ns, TRANSFER_ENDS)
        self._replica.release(request)

    # Transfers

    def _write(self, request: Request, missing: Sequence[tuple[int, bytes]], ready_ns: int) -> None:
        there_ns = self._writes[0].send(len(missing) * self._block_bytes, ready_ns)
        self._there_ns.update((key, there_ns) for _, key in missing)

    def _written(self, keys: Sequence[bytes]) -> int:
        return max((self._there_ns[key] for key in keys), default=0)

    def _moved(self, pushed: dict[bytes, int]) -> None:
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
        """Raise AssertionError if a tier exceeds its capacity, or the times do not belong to exactly its blocks."""
        self.cache.check()
        assert all(self.cache.tier(key) is not None for key in self._there_ns)
        assert len(self.cache) == len(self._there_ns)


def add_tiers(clock: VirtualClock, log: RunLog, replica: Replica, deployment: Deployment) -> None:
    """Give `replica` the KV tiers of the deployment. Raises UserError if its policy cannot load KV."""
    connect_tiers(log, replica, TieredKv(clock, log, replica, deployment))


def connect_tiers(log: RunLog, replica: Replica, tiers: TieredKv) -> None:
    """Let `replica` use `tiers`."""
    replica.connect(tiers)
    log.tiered(replica.index)
    replica.on_planned = tiers.planned
