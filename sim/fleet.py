"""The pools and replicas of a fleet: which replicas were started, which take requests, and how long each is paid for.

The replicas of a pool run one deployment, and have one cost model. A replica is one engine from its start to its end:
it starts, becomes ready, serves, and drains or crashes. The successor of a crashed replica is a new replica. If pools
are reserved for an SLO class, its requests go to those pools. All other requests go to the pools without classes, or to
all pools if every pool has classes. Among these pools, a request goes to the first with room for its length. The same
holds among decode pools for requests that come from a prefill pool.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from simpy.events import ProcessGenerator

from tokentwin.serving.adapter_times import AdapterTimes, adapter_times
from tokentwin.serving.cost_model import CostModel, NetworkedCost, paced
from tokentwin.serving.deployments.config import Deployment, pool_deployment
from tokentwin.serving.deployments.fleet import FleetConfig, PoolConfig, routed_pools
from tokentwin.serving.deployments.inter_node import nodes_of
from tokentwin.serving.deployments.kv_layout import for_transfers
from tokentwin.serving.encoder_times import EncoderTimes, StatedEncoderTimes, encoder_times
from tokentwin.serving.errors import UserError
from tokentwin.serving.request import Request
from tokentwin.serving.scheduler import Scheduler, find_policy
from tokentwin.serving.user_code.own_contract import contract_with
from tokentwin.serving.workload import WorkloadRequest
from tokentwin.sim.adapter_slots import AdapterSlots
from tokentwin.sim.clock import VirtualClock
from tokentwin.sim.encoder import Encoder
from tokentwin.sim.encoder_pools import EncoderPools, EncodingOnly, encoder_scheduler
from tokentwin.sim.kv_tiers import add_tiers
from tokentwin.sim.kv_transfers import KvTransfers
from tokentwin.sim.links import SharedNetwork
from tokentwin.sim.lockstep import Lockstep, Rank, steps_together
from tokentwin.sim.replica import Replica
from tokentwin.sim.router import ReplicaSet, Router
from tokentwin.sim.run_log import RunLog


@dataclass(frozen=True)
class PricedPool:
    """A pool, the deployment its replicas run, and the cost model of their steps."""

    config: PoolConfig
    deployment: Deployment
    cost: CostModel

    @property
    def ranks(self) -> int:
        """The number of data-parallel ranks of one engine. Each has its own scheduler and is simulated as a replica."""
        return self.deployment.data_parallel_size

    @property
    def gpus(self) -> int:
        """The number of GPUs of one rank."""
        return self.deployment.gpus // self.ranks


def networked(pool: PricedPool) -> NetworkedCost:
    """Return the pool's cost model, which must state how long data between nodes keeps the network busy.

    Raises UserError if the cost model does not state this, or if the engines have pipeline stages.
    """
    if not isinstance(pool.cost, NetworkedCost):
        remedy = "needs the kernel tables of a GPU; simulate with --gpu, or leave it out"
        raise UserError("fleet.links.shares_inter_node", True, remedy)
    if (stages := pool.deployment.pipeline_parallel_size) > 1:
        remedy = "cannot be combined with fleet.links.shares_inter_node; leave one of them out"
        raise UserError("pipeline_parallel_size", stages, remedy)
    return pool.cost


def adapted(pool: PricedPool, scheduler: Scheduler) -> AdapterTimes:
    """Return the times of LoRA adapters on the pool's replicas.

    Raises UserError if its cost model does not know them, or if its policy does not know of slots for adapters.
    """
    if not hasattr(scheduler, "adapters"):
        remedy = "knows no slots for adapters; derive it from VllmScheduler, or leave lora out"
        raise UserError("policy", pool.deployment.policy, remedy)
    times = adapter_times(pool.cost)
    if times is None:
        remedy = "needs the kernel tables of a GPU, or a calibration that measured adapters; use one, or leave it out"
        raise UserError("lora", "on", remedy)
    return times.scaled(1 / pool.config.speed)


def encoder_of(pool: PricedPool, scheduler: Scheduler) -> EncoderTimes:
    """Return the times of the encoder of the pool's replicas, as stated or as its cost model knows them.

    Raises UserError if neither does, or if its policy does not know of items.
    """
    multimodal = pool.deployment.multimodal
    if not hasattr(scheduler, "encoding"):
        raise _no_items(pool.deployment.policy)
    if multimodal is not None and multimodal.encoder_us_per_token is not None:
        return StatedEncoderTimes(1000 * multimodal.encoder_us_per_token)
    times = encoder_times(pool.cost)
    if times is None:
        remedy = f"is not known for {pool.deployment.model} here; name a tower, or set encoder_us_per_token"
        raise UserError("multimodal.tower", None, remedy)
    return times.on(pool.deployment).scaled(1 / pool.config.speed)


def _no_items(policy: str) -> UserError:
    return UserError(
        "policy", policy, "knows no items to encode; derive it from VllmScheduler, or leave multimodal out"
    )


def alike_pools(fleet: FleetConfig, deployment: Deployment, cost: CostModel) -> list[PricedPool]:
    """Return the pools of `fleet`, all with the cost model `cost`."""
    return [PricedPool(pool, pool_deployment(deployment, pool), cost) for pool in fleet.pools]


class Life:
    """The lifetime of a replica: when it was started, became ready and ended, and what ended it.

    Attributes:
        replica: the replica
        pool: index of its pool
        place: its place in the fleet, which the successor of a crashed replica takes over
        slot: its place in its pool, which the successor of a crashed replica takes over, too
        generation: number of earlier replicas in this place
        started_ns: time of the start
        ready_ns: time from which it takes requests; None if it is not ready yet
        ended_ns: time of its end; None if it has not ended
        ended_by: `scale-in`, `crash` or `interruption`; empty if it has not ended
        drains: cause for which it gets no more requests and ends when it has none; empty if it does not drain
    """

    def __init__(self, replica: Replica, pool: int, place: int, slot: int, generation: int, started_ns: int) -> None:
        self.replica = replica
        self.pool = pool
        self.place = place
        self.slot = slot
        self.generation = generation
        self.started_ns = started_ns
        self.ready_ns: int | None = None
        self.ended_ns: int | None = None
        self.ended_by = ""
        self.drains = ""

    @property
    def serves(self) -> bool:
        return self.ready_ns is not None and not self.drains and not self.ended_by


class Fleet:
    """The pools of replicas on one clock.

    Attributes:
        replicas: all replicas started so far, in order of their index
        changes: number of times that a replica was started, became ready or ended
        scaled_pools: indices of the pools that have an autoscaler
        on_ready: functions that are called with each replica that takes requests from now on
        on_gone: functions that are called with each replica that has crashed or ended after draining

    Args:
        on_end: function that is called with each request that finishes or that can never fit
        on_lost: function that is called with the requests of a replica that has crashed
    """

    def __init__(
        self,
        clock: VirtualClock,
        log: RunLog,
        pools: Sequence[PricedPool],
        routers: Callable[[], Router],
        shares_prefixes: bool,
        on_end: Callable[[Request], None],
        on_lost: Callable[[list[Request]], None],
        decode_routers: Callable[[], Router] | None = None,
        transfers: KvTransfers | None = None,
        encoders: EncoderPools | None = None,
        encode_routers: Callable[[], Router] | None = None,
    ) -> None:
        self.pools = pools
        self.replicas: list[Replica] = []
        self.changes = 0
        self.scaled_pools: set[int] = set()
        self._on_end = on_end
        self._on_lost = on_lost
        self.on_ready: list[Callable[[Life], None]] = []
        self.on_gone: list[Callable[[Life], None]] = []
        self._clock = clock
        self._log = log
        self._shares_prefixes = shares_prefixes
        self._policies = [find_policy(pool.deployment.policy) for pool in pools]
        self._costs: list[CostModel] = [
            EncodingOnly() if pool.config.role == "encode" else paced(pool.cost, 1 / pool.config.speed)
            for pool in pools
        ]
        self._lives: list[Life] = []
        self._groups: dict[int, Lockstep] = {}  # newest group of data-parallel ranks, by pool
        self._slots = [0] * len(pools)  # number of slots of each pool so far
        self._living: list[dict[int, Life]] = [{} for _ in pools]  # replicas by pool and index
        self._transfers = transfers
        self._encoders = encoders
        self._routes = _routes(pools, ("serve", "prefill"), routers)
        self._decode_routes = _routes(pools, ("decode",), decode_routers or routers)
        self._encode_routes = _routes(pools, ("encode",), encode_routers or routers)
        routes = [*self._routes.every(), *self._decode_routes.every(), *self._encode_routes.every()]
        self._routes_of = [[route for route in routes if pool in route.pools] for pool in range(len(pools))]
        for number, pool in enumerate(pools):
            for _ in range(pool.config.replicas * pool.ranks):
                self._ready(self._new(number))

    # Called by the gateway

    def route(self, request: WorkloadRequest) -> Replica | None:
        """Return the replica for `request`, which has arrived; None if no replica is ready."""
        if self._transfers is not None and self._transfers.begins_at_decode(request):
            return self.route_decode(request)
        return self._routes.choose(request)

    def route_prefill(self, request: WorkloadRequest) -> Replica | None:
        """Return the replica of a prefill or serve pool for `request`; None if no such replica is ready."""
        return self._routes.choose(request)

    def route_decode(self, request: WorkloadRequest) -> Replica | None:
        """Return the decode replica for `request`; None if no decode replica is ready."""
        return self._decode_routes.choose(request)

    def route_encode(self, job: WorkloadRequest) -> Replica | None:
        """Return the encoder replica for `job`, an item of a request; None if no encoder replica is ready."""
        return self._encode_routes.choose(job)

    def offered_to(self, replica: Replica, request: WorkloadRequest) -> WorkloadRequest:
        """Return the part of `request` that `replica` gets: up to its first token on a prefill replica, else all."""
        return request if self._transfers is None else self._transfers.offered(request, self.role(replica))

    def role(self, replica: Replica) -> str:
        return self.pools[self._lives[replica.index].pool].config.role

    def awaits(self, request: WorkloadRequest) -> bool:
        """Return whether a replica for `request`, which has arrived, is starting or may be started."""
        if self._transfers is not None and self._transfers.begins_at_decode(request):
            return self.awaits_decode(request)
        return self.awaits_prefill(request)

    def awaits_prefill(self, request: WorkloadRequest) -> bool:
        """Return whether a replica of a prefill or serve pool for `request` is starting or may be started."""
        return self._awaits(self._routes.route_for(request))

    def awaits_decode(self, request: WorkloadRequest) -> bool:
        """Return whether a decode replica for `request` is starting or may be started."""
        return self._awaits(self._decode_routes.route_for(request))

    def awaits_encode(self, job: WorkloadRequest) -> bool:
        """Return whether an encoder replica for `job` is starting or may be started."""
        return self._awaits(self._encode_routes.route_for(job))

    def _awaits(self, route: _Route) -> bool:
        return any(
            pool in self.scaled_pools or any(life.ready_ns is None for life in self._living[pool].values())
            for pool in route.pools
        )

    # Called by failures and autoscalers

    def living(self, pool: int) -> list[Life]:
        """Return the replicas of a pool that have not ended, oldest first: they start, serve or drain."""
        return list(self._living[pool].values())

    def start(self, pool: int, cold_start_ns: int, after: Life | None = None) -> None:
        """Start another replica in `pool`, which is ready after `cold_start_ns`. It succeeds `after`, if given."""
        life = self._new(pool, after)
        self._clock.start(self._warm_up(life, cold_start_ns))

    def _warm_up(self, life: Life, cold_start_ns: int) -> ProcessGenerator:
        yield self._clock.until(self._clock.now_ns + cold_start_ns)
        self._ready(life)

    def drain(self, life: Life, ended_by: str = "scale-in") -> None:
        """Send no more requests to the replica, and end it when it has none, which may be now."""
        self._leave(life)
        life.drains = ended_by
        life.replica.listeners.append(self)
        if not life.replica.outstanding_requests:
            self._end(life, ended_by)

    def interrupt(self, life: Life, notice_ns: int, restart_ns: int | None) -> None:
        """Take a replica away after a notice, in which it gets no more requests.

        A successor is ready `restart_ns` after now (None: no successor).
        """
        if not life.drains:
            if restart_ns is not None:
                self.start(life.pool, restart_ns, life)
            self.drain(life, "interruption")
        if not life.ended_by:
            self._clock.start(self._take_away(life, notice_ns))

    def _take_away(self, life: Life, notice_ns: int) -> ProcessGenerator:
        yield self._clock.until(self._clock.now_ns + notice_ns)
        if not life.ended_by:
            self.crash(life, None, "interruption")

    def crash(self, life: Life, recovery_ns: int | None, ended_by: str = "crash") -> None:
        """Crash the replica. Unless it drains, a successor is ready after `recovery_ns` (None: no successor)."""
        self._leave(life)
        self._end(life, ended_by)
        requests = life.replica.crash()
        self._log.crashed(life.replica.index)
        if recovery_ns is not None and not life.drains:
            self.start(life.pool, recovery_ns, life)
        if self._encoders is not None and self.role(life.replica) == "encode":
            self._encoders.lost(requests)
        else:
            self._on_lost(requests)

    # Lives

    def lives_of(self, role: str) -> list[Life]:
        """Return all lives of replicas of pools of `role`."""
        return [life for life in self._lives if self.pools[life.pool].config.role == role]

    def record(self) -> list[dict[str, Any]]:
        """Return the value of the column `replica_lives` of a recording."""
        return [
            {
                "replica": life.replica.index,
                "pool": self.pools[life.pool].config.name,
                "gpus": self.pools[life.pool].gpus,
                "started_ns": life.started_ns,
                "ready_ns": life.ready_ns,
                "ended_ns": life.ended_ns,
                "ended_by": life.ended_by,
            }
            for life in self._lives
        ]

    def _new(self, pool: int, after: Life | None = None) -> Life:
        deployment, index = self.pools[pool].deployment, len(self.replicas)
        shares = self._shares_prefixes or deployment.kv_tiers is not None  # tiers find blocks by their content
        if self.pools[pool].config.role == "encode":
            return self._kept_life(self._new_encoder(pool, index), pool, after)
        settings = deployment.staged_settings
        if settings.encoder_apart != (apart := self._encoders is not None):
            settings = settings.model_copy(update={"encoder_apart": apart})
        if self._transfers is not None:
            settings = for_transfers(settings)
            if "sglang" in deployment.policy:
                settings = settings.model_copy(update={"sglang_outline": True})
        scheduler = self._policies[pool](settings, shares_prefixes=shares)
        policy = contract_with(deployment.policy, scheduler, settings, by_segments=True)
        self._log.started(index, settings)
        stages = deployment.pipeline_parallel_size
        made = self._clock, index, policy, self._costs[pool], self._log, self._on_end, stages
        replica = Rank(self._lockstep(pool, stages), *made) if steps_together(deployment) else Replica(*made)
        if self._transfers is not None:
            self._transfers.connect(replica, self.pools[pool].config.role)
            if self._transfers.shares_inter_node and nodes_of(deployment) > 1:
                replica.share(SharedNetwork(self._transfers.links, index, networked(self.pools[pool])))
        if deployment.lora is not None:
            replica.adapters = AdapterSlots(adapted(self.pools[pool], scheduler), deployment.lora)
        if self._encoders is not None and not hasattr(scheduler, "encoding"):
            raise _no_items(deployment.policy)
        if deployment.multimodal is not None and self._encoders is None:
            replica.encoder = Encoder(encoder_of(self.pools[pool], scheduler))
        if deployment.kv_tiers is not None:
            add_tiers(self._clock, self._log, replica, deployment)
        return self._kept_life(replica, pool, after)

    def _new_encoder(self, pool: int, index: int) -> Replica:
        """Return a new encoder replica, whose scheduler is vLLM's, whatever the policy of the other pools."""
        assert self._encoders is not None
        settings, log = encoder_scheduler(self.pools[pool].deployment), self._encoders.log
        scheduler = find_policy("vllm")(settings, shares_prefixes=False)
        contract = contract_with("vllm", scheduler, settings, by_segments=True)
        for one in (self._log, log):
            one.started(index, settings)
        replica = Replica(self._clock, index, contract, self._costs[pool], log, self._encoders.ended)
        replica.encoder = Encoder(encoder_of(self.pools[pool], scheduler))
        return replica

    def _kept_life(self, replica: Replica, pool: int, after: Life | None) -> Life:
        index = replica.index
        life = Life(replica, pool, *self._place(pool, after), self._clock.now_ns)
        self.replicas.append(replica)
        self._lives.append(life)
        self.changes += 1
        self._living[pool][index] = life
        return life

    def _lockstep(self, pool: int, stages: int) -> Lockstep:
        """Return the group of the next rank. The ranks of an engine are made one after another."""
        group = self._groups.get(pool)
        if group is None or not group.left:
            overlaps = self.pools[pool].deployment.scheduler.async_scheduling
            group = self._groups[pool] = Lockstep(self._clock, self.pools[pool].ranks, stages, overlaps)
        return group

    def _place(self, pool: int, after: Life | None) -> tuple[int, int, int]:
        """Return place, slot and generation of a new replica: those after `after`, or a new place."""
        if after is not None:
            return after.place, after.slot, after.generation + 1
        self._slots[pool] += 1
        return sum(self._slots) - 1, self._slots[pool] - 1, 0

    def _ready(self, life: Life) -> None:
        if life.ended_by:
            return
        life.ready_ns = self._clock.now_ns
        self.changes += 1
        for route in self._routes_of[life.pool]:
            route.replicas.join(life.replica)
        for call in self.on_ready:
            call(life)

    def _leave(self, life: Life) -> None:
        if life.serves:
            for route in self._routes_of[life.pool]:
                route.replicas.leave(life.replica)

    def _end(self, life: Life, ended_by: str) -> None:
        life.ended_ns, life.ended_by = self._clock.now_ns, ended_by
        self.changes += 1
        del self._living[life.pool][life.replica.index]
        for call in self.on_gone:
            call(life)

    # Called by a replica that drains

    def load_grew(self, replica: Replica) -> None:
        """Do nothing, because a draining replica gets no more requests."""

    def load_shrank(self, replica: Replica) -> None:
        life = self._lives[replica.index]
        if not replica.outstanding_requests and not life.ended_by:
            self._end(life, life.drains)


@dataclass(frozen=True, eq=False)
class _Route:
    """The destination of some requests: the pools, their ready replicas and the router.

    `limits` are the most prompt tokens, and the most prompt tokens and `max_tokens` together. A longer request takes
    the route `beyond`, which is None if there is no limit.
    """

    pools: tuple[int, ...]
    router: Router
    replicas: ReplicaSet
    limits: tuple[int | None, int | None] = (None, None)
    beyond: _Route | None = None

    def takes(self, request: WorkloadRequest) -> bool:
        prompt, total = self.limits
        if prompt is not None and request.prompt_len > prompt:
            return False
        return total is None or request.prompt_len + request.output_limit <= total


class _Routes(dict[str | None, _Route]):
    """The first route of each SLO class. The key None stands for all classes for which no pool is reserved."""

    def route_for(self, request: WorkloadRequest) -> _Route:
        route = self.get(request.slo_class) or self[None]
        while route.beyond is not None and not route.takes(request):
            route = route.beyond
        return route

    def choose(self, request: WorkloadRequest) -> Replica | None:
        """Return the replica for `request`; None if no replica is ready."""
        route = self.route_for(request)
        return route.router.choose(request, route.replicas) if route.replicas else None

    def every(self) -> list[_Route]:
        """Return all routes, each once."""
        routes: dict[_Route, None] = {}
        for first in self.values():
            route: _Route | None = first
            while route is not None:
                routes[route] = None
                route = route.beyond
        return list(routes)


def _routes(pools: Sequence[PricedPool], roles: Collection[str], routers: Callable[[], Router]) -> _Routes:
    """Return the routes to the pools with these roles. Classes that have the same pools share their routes."""
    wanted = routed_pools([pool.config for pool in pools], roles)
    made: dict[tuple[tuple[int, ...], ...], _Route] = {}
    for groups in wanted.values():
        for at in reversed(range(len(groups))):  # the route for the longest requests first
            if groups[at:] not in made:
                limits = pools[groups[at][0]].config.limits if groups[at] else (None, None)
                made[groups[at:]] = _Route(groups[at], routers(), ReplicaSet(), limits, made.get(groups[at + 1 :]))
    return _Routes({name: made[groups] for name, groups in wanted.items()})
