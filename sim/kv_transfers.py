"""KV transfers from prefill replicas to decode replicas, as in vLLM and TensorRT-LLM.

A prefill replica keeps the blocks of a request that has its first token. A decode replica pulls the KV when it has
blocks for it, and only the part that its prefix cache lacks. Then the prefill replica frees its blocks. So if the
decode pool is full, the prefill pool fills up, too, and prefills no more requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from tokentwin.serving.deployments.fleet import LinksConfig
from tokentwin.serving.deployments.kv_layout import kv_bytes_per_token, kv_dtype, states_bytes
from tokentwin.serving.errors import UserError
from tokentwin.serving.request import Request
from tokentwin.serving.workload import WorkloadRequest
from tokentwin.sim.clock import VirtualClock
from tokentwin.sim.links import Flow, Links
from tokentwin.sim.replica import Replica
from tokentwin.sim.run_log import RunLog

if TYPE_CHECKING:
    from tokentwin.sim.fleet import PricedPool

_GB = 1e9


class _Kept:
    """The KV that `source` keeps for `request`, which has its first token, and the decode replica that pulls it."""

    __slots__ = ("flow", "pulled_by", "request", "source")

    def __init__(self, source: Replica, request: Request) -> None:
        self.source = source
        self.request = request
        self.flow: Flow | None = None
        self.pulled_by: tuple[Replica, Request] | None = None


class KvTransfers:
    """The KV that prefill replicas keep for decode replicas, and its transfers.

    Attributes:
        links: the links that carry KV
        hands_on_first_token: True if decode replicas take over the first token as well as the KV

    Args:
        on_awaiting: function that is called with each request that is ready for a replica of the other role: decode
            here, prefill in `KvReservations`
    """

    def __init__(
        self,
        clock: VirtualClock,
        log: RunLog,
        links: LinksConfig,
        exchanged: ExchangedKv,
        on_awaiting: Callable[[Request], None],
        hands_on_first_token: bool = True,
    ) -> None:
        self.shares_inter_node = links.shares_inter_node
        self.links = links_of(clock, links)
        self.hands_on_first_token = hands_on_first_token
        self._clock = clock
        self._log = log
        self._exchanged = exchanged
        self._on_awaiting = on_awaiting
        self._awaited: set[int] = set()  # ids of requests on prefill replicas that will be taken over
        self._kept: dict[int, _Kept] = {}

    def connect(self, replica: Replica, role: str) -> None:
        """Connect the new `replica` of a pool of `role`. Raises UserError if its policy cannot keep or load KV."""
        if role == "prefill":
            replica.connect(_Source(self))
            replica.hands_on = partial(self._keep, replica)
        elif role == "decode":
            replica.connect(_Destination(self, replica))

    def begins_at_decode(self, request: WorkloadRequest) -> bool:
        """Return whether `request` is offered to a decode replica before it is prefilled."""
        return False

    def gives(self, live: Request, request: WorkloadRequest) -> bool:
        """Return whether users get the tokens of `live`, an attempt at `request`."""
        return self.hands_on_first_token or live.truth is request

    def has_begun(self, id: int) -> bool:
        """Return whether a prefill replica has begun with a request that a decode replica took before."""
        return False

    def offered(self, request: WorkloadRequest, role: str) -> WorkloadRequest:
        """Return the part of `request`, which has arrived, that a replica of `role` gets."""
        if role != "prefill":
            return request
        if request.output_len > 1 or not (request.pools or self.hands_on_first_token):
            self._awaited.add(request.id)
        return first_token_of(request)

    def drop(self, id: int) -> None:
        """Drop the KV that is kept for a request, and stop its transfer."""
        self._awaited.discard(id)
        kept = self._kept.pop(id, None)
        if kept is None:
            return
        if kept.flow is not None and kept.pulled_by is not None:
            self.links.cancel(kept.flow)
            replica, request = kept.pulled_by
            replica.load_failed(request)
        kept.source.release(kept.request)

    def keeps(self, id: int) -> bool:
        return id in self._awaited

    def matched(self, request: Request, cached_tokens: int) -> int:
        return max(request.prompt_len - cached_tokens, 0) if request.id in self._kept else 0

    def pull(self, replica: Replica, request: Request, tokens: int) -> None:
        kept = self._kept[request.id]
        kept.pulled_by = replica, request
        size = self._exchanged.of_request + tokens * self._exchanged.of_token
        kept.flow = self.links.start(kept.source.index, replica.index, size, partial(self._pulled, request.id))
        self._log.transfer_begins(request, self._clock.now_ns)

    def _keep(self, source: Replica, request: Request) -> bool:
        """Return whether a decode replica will take over `request`, which has its first token; if so, keep its KV."""
        if request.id not in self._awaited:
            return False
        self._awaited.remove(request.id)
        self._log.handed_on(request, self._clock.now_ns)
        self._kept[request.id] = _Kept(source, request)
        self._on_awaiting(request)
        return True

    def _pulled(self, id: int) -> None:
        kept = self._kept.pop(id)
        assert kept.pulled_by is not None
        replica, request = kept.pulled_by
        self._log.transferred(request, self._clock.now_ns)
        kept.source.release(kept.request)
        replica.loaded(request)

    def admitted(self, request: Request) -> None:
        """Free the KV that is still kept for `request`, which runs on its decode replica now.

        KV is still kept if that replica found all of it in its own prefix cache.
        """
        kept = self._kept.pop(request.id, None)
        if kept is not None:
            kept.source.release(kept.request)


def links_of(clock: VirtualClock, config: LinksConfig) -> Links:
    """Return the links that `config` describes."""
    fabric = None if config.fabric_gb_s is None else config.fabric_gb_s * _GB
    return Links(clock, round(config.latency_us * 1000), config.nic_gb_s * _GB, fabric)


def first_token_of(request: WorkloadRequest) -> WorkloadRequest:
    """Return the part of `request` that a prefill replica runs: all of a pooling request."""
    return request if request.pools else replace(request, output_len=1, max_tokens=None)


class _Source:
    """The `ExternalKv` of a prefill replica: there is nothing to load, but some KV must be kept."""

    synchronous: ClassVar[bool] = False

    def __init__(self, transfers: KvTransfers) -> None:
        self._transfers = transfers

    def matched(self, request: Request, cached_tokens: int) -> int:
        return 0

    def load(self, request: Request, start: int, tokens: int) -> None:
        raise AssertionError("nothing matched")

    def admitted(self, request: Request) -> None:
        """Do nothing, because no KV was loaded."""

    def keeps(self, request: Request) -> bool:
        return self._transfers.keeps(request.id)


class _Destination:
    """The `ExternalKv` of a decode replica: the KV that prefill replicas keep for it."""

    synchronous: ClassVar[bool] = False

    def __init__(self, transfers: KvTransfers, replica: Replica) -> None:
        self._transfers = transfers
        self._replica = replica

    def matched(self, request: Request, cached_tokens: int) -> int:
        return self._transfers.matched(request, cached_tokens)

    def load(self, request: Request, start: int, tokens: int) -> None:
        self._transfers.pull(self._replica, request, tokens)

    def admitted(self, request: Request) -> None:
        self._transfers.admitted(request)

    def keeps(self, request: Request) -> bool:
        return False


class ExchangedKv(NamedTuple):
    """The bytes of a request that two pools exchange, over all devices: per token, and once for constant states."""

    of_token: int
    of_request: int = 0


def exchanged_kv(links: LinksConfig, pools: Sequence[PricedPool]) -> ExchangedKv:
    """Return the bytes that the prefill and decode pools exchange.

    Raises UserError if the pools do not all have one model and one type of KV.
    """
    ends = [pool for pool in pools if pool.config.role in ("prefill", "decode")]
    first, name = ends[0].deployment, ends[0].config.name
    for pool in ends[1:]:
        own = pool.deployment
        for setting, kept, other in (
            ("model", first.model, own.model),
            ("kv_cache_dtype", kv_dtype(first), kv_dtype(own)),
        ):
            if kept != other:
                remedy = f"must be {kept}, as in pool {name!r}, because the two pools exchange KV"
                raise UserError(f"fleet.pools.{pool.config.name}.deployment.{setting}", other, remedy)
    of_token = kv_bytes_per_token(first, links.kv_bytes_per_token, "fleet.links.kv_bytes_per_token")
    return ExchangedKv(of_token, states_bytes(first))
