"""A simulated run: a workload, a fleet of replicas behind a router, and one virtual clock.

A `Cluster` writes its rows to a sink; `simulate_to` writes them to a recording on disk.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from simpy.core import EmptySchedule

from tokentwin.serving.clients import Clients
from tokentwin.serving.cost_model import CostModel
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.fleet import (
    AutoscalerConfig,
    FailuresConfig,
    FleetConfig,
    LinksConfig,
    RouterConfig,
    plain_fleet,
)
from tokentwin.serving.deployments.kv_capacity import engine_weight_bytes
from tokentwin.serving.errors import UserError
from tokentwin.serving.front_door import FrontDoor
from tokentwin.serving.kv.external import ExternalKv
from tokentwin.serving.workload import Workload, WorkloadRequest, with_session_ends
from tokentwin.sim.adapter_slots import AdapterUse
from tokentwin.sim.api_server import ApiServer
from tokentwin.sim.autoscaler import Autoscaler, autoscaling
from tokentwin.sim.clock import VirtualClock
from tokentwin.sim.encoder import EncoderUse
from tokentwin.sim.encoder_pools import ApartUse, EncoderPools, embedding_bytes
from tokentwin.sim.failures import Failures
from tokentwin.sim.fleet import Fleet, PricedPool, alike_pools
from tokentwin.sim.gateway import Arrivals, Gateway
from tokentwin.sim.kv_reservations import KvReservations
from tokentwin.sim.kv_tiers import TieredKv, connect_tiers
from tokentwin.sim.kv_transfers import KvTransfers, exchanged_kv, links_of
from tokentwin.sim.own_process import Controls, own_process
from tokentwin.sim.replica import Replica
from tokentwin.sim.router import Router, find_router
from tokentwin.sim.routers.predicted_latency import PredictedLatency
from tokentwin.sim.run_log import BLOCK, RunLog, RunSink, TokenObserver
from tokentwin.traces.recording import Recording
from tokentwin.traces.recording_writer import RecordingWriter


@dataclass(frozen=True)
class Simulated:
    """The totals of a simulation. Its rows are in the sink. Uses of what no replica has are None."""

    duration_ns: int
    finished: int
    steps: int
    output_tokens: int
    adapters: AdapterUse | None = None
    encoder: EncoderUse | None = None
    encoders_apart: ApartUse | None = None


class Cluster:
    """The replicas behind a router. `run` offers a workload to them and returns when all its requests have ended.

    The fleet is `fleet`, or else that of the deployment, or else `replicas` equal replicas. `pools` gives the cost
    model of each pool; without it, all pools use `cost`. A given `router` replaces that of the fleet. `steps`,
    `tokens`, `block`, `on_tokens` and `leaps` are passed on to the `RunLog`. With a `front_door`, clients reach the
    fleet through an API server, and steps are kept if texts queue there. The rows as clients see them go to the sink
    `clients`.
    """

    def __init__(
        self,
        deployment: Deployment,
        cost: CostModel,
        sink: RunSink,
        *,
        replicas: int = 1,
        router: Router | None = None,
        fleet: FleetConfig | None = None,
        pools: Sequence[PricedPool] | None = None,
        shares_prefixes: bool = True,
        steps: bool = True,
        tokens: bool = False,
        block: int = BLOCK,
        on_tokens: TokenObserver | None = None,
        leaps: bool = False,
        front_door: FrontDoor | None = None,
        clients: RunSink | None = None,
    ) -> None:
        config = fleet or deployment.fleet or plain_fleet(replicas)
        pools = pools or alike_pools(config, deployment, cost)
        _check_ranks(config, pools)
        self._config = config
        self._clock = VirtualClock()
        left, self._api_server = self._left, None
        if front_door is not None:
            pools = [replace(pool, cost=front_door.beside(pool.cost)) for pool in pools]
            ranks = max(pool.ranks for pool in pools)

            def engines() -> int:
                return len(self.replicas) // ranks

            self._api_server = sink = ApiServer(self._clock, front_door, sink, clients, self._left, engines, ranks)
            left = sink.left
            if front_door.queues_texts:
                on_tokens, steps = sink.sampled, True
        self._log = RunLog(sink, steps, tokens, block, on_tokens, leaps)
        self._gateway = gateway = Gateway(self._clock, self._log, config.admission, left)
        if self._api_server is not None:
            self._api_server.open(gateway.offer)

        def routers() -> Router:
            return self._told_of_ends(router or find_router(config.router.name, **config.router.settings))

        def decode_routers() -> Router:
            chosen = config.decode_router or config.router
            return self._told_of_ends(find_router(chosen.name, **chosen.settings))

        transfers: KvTransfers | None = None
        if config.prefills_apart:
            _check_cuts(pools)
            links = config.links or LinksConfig()
            made = self._clock, self._log, links, exchanged_kv(links, pools)
            if config.reserves_first:
                _check_reserving(pools)
                transfers = KvReservations(*made, gateway.reserved)
            else:
                transfers = KvTransfers(*made, gateway.prefilled, config.first_token_from == "prefill")
        self._links = None if transfers is None else transfers.links
        encoders: EncoderPools | None = None
        if config.encodes_apart:
            self._links = self._links or links_of(self._clock, config.links or LinksConfig())
            stage = self._clock, self._links, embedding_bytes(pools)
            encoders = EncoderPools(*stage, gateway.encoded, gateway.not_encoded)
        self._encoders = encoders

        def encode_routers() -> Router:
            chosen = config.encode_router or RouterConfig()
            return find_router(chosen.name, **chosen.settings)

        self._fleet = Fleet(
            self._clock,
            self._log,
            pools,
            routers,
            shares_prefixes,
            gateway.ended,
            gateway.lost,
            decode_routers,
            transfers,
            encoders,
            encode_routers,
        )
        gateway.open(self._fleet, transfers, encoders)
        if encoders is not None:
            encoders.open(self._fleet)
        self._arrivals: Arrivals | None = None
        self._runs = True

    @property
    def replicas(self) -> list[Replica]:
        """All replicas started so far, in order of their index."""
        return self._fleet.replicas

    def connect_tiers(self, make: Callable[[VirtualClock, RunLog, Replica], TieredKv]) -> None:
        """Give every replica started so far the KV tiers that `make` returns; no replica may have tiers already."""
        for replica in self.replicas:
            connect_tiers(self._log, replica, make(self._clock, self._log, replica))

    def connect(self, make: Callable[[VirtualClock, Replica], ExternalKv]) -> None:
        """Let every replica started so far load KV from the object that `make` returns.

        Raises UserError if a replica's policy does not support this.
        """
        for replica in self.replicas:
            replica.connect(make(self._clock, replica))

    @property
    def replica_lives(self) -> list[dict[str, Any]]:
        """The value of the column `replica_lives` in a recording of this run."""
        return self._fleet.record()

    def run(self, workload: Workload, offered_ns: Mapping[int, int] | None = None) -> Simulated:
        """Simulate `workload` to its end. Raises UserError if a policy breaks its contract.

        `offered_ns` maps request ids to the times at which requests reach the fleet, if these are not their arrivals.
        """
        self._log.counted_from_ns = workload.warm_up_ns
        self._log.counted_from_id = workload.warm_up_requests
        if any(pool.deployment.scheduler.kv_eviction == "session" for pool in self._fleet.pools):
            workload = with_session_ends(workload)
        self._begin()
        send = self._gateway.offer if self._api_server is None else self._api_server.send
        self._arrivals = Arrivals(self._clock, Clients(workload, offered_ns), send)
        self._stop_when_all_have_left()
        next_event = self._clock.step
        try:
            with _no_cycle_search():
                while self._runs:
                    next_event()
                return self._end()
        except EmptySchedule:
            policies = ", ".join(dict.fromkeys(pool.deployment.policy for pool in self._fleet.pools))
            remedy = f"{len(self._gateway)} requests never finish: the policy no longer schedules them"
            raise UserError("policy", policies, remedy) from None

    def _begin(self, for_ever: bool = False) -> None:
        """Start failures, autoscalers and users' processes.

        Autoscalers end when no other event remains, unless `for_ever` is True.
        """
        config = self._config
        Failures(self._clock, self._fleet, config, lambda: self._log.finished, self._links)
        scalers = [self._autoscaler(config.pool_number(scaler.pool), scaler) for scaler in config.autoscaler or ()]
        if scalers:
            self._clock.start(autoscaling(self._clock, scalers, for_ever))
        for name in config.processes:
            self._clock.start(own_process(name, self._clock, Controls(self._fleet, config)))

    def _told_of_ends(self, router: Router) -> Router:
        """Let a router that learns latencies observe the ends of requests; return the router."""
        if isinstance(router, PredictedLatency):
            self._log.observers.append(router.ended)
        return router

    def _autoscaler(self, pool: int, config: AutoscalerConfig) -> Autoscaler:
        cold_start_s = config.cold_start_s
        if config.weights_gb_s is not None:
            cold_start_s += engine_weight_bytes(self._fleet.pools[pool].deployment) / (1e9 * config.weights_gb_s)
        waiting = self._gateway.__len__
        return Autoscaler(self._clock, self._log, self._fleet, pool, config, cold_start_s, waiting)

    def _end(self) -> Simulated:
        self._log.close()
        steps = self._log.steps + sum(replica.steps_in_flight for replica in self.replicas)
        uses = [replica.adapters.use for replica in self.replicas if replica.adapters is not None]
        adapters = AdapterUse(*map(sum, zip(*uses, strict=True))) if uses else None
        encoded = [replica.encoder.use for replica in self.replicas if replica.encoder is not None]
        encoder = EncoderUse(*map(sum, zip(*encoded, strict=True))) if encoded else None
        apart = None
        if self._encoders is not None:
            apart = self._encoders.use(self._fleet.lives_of("encode"), self._clock.now_ns)
        totals = self._clock.now_ns, self._log.finished, steps, self._log.output_tokens
        return Simulated(*totals, adapters, encoder, apart)

    def _left(self, request: WorkloadRequest) -> None:
        assert self._arrivals is not None
        self._arrivals.ended(request)
        self._stop_when_all_have_left()

    def _stop_when_all_have_left(self) -> None:
        if self._arrivals is not None and self._arrivals.exhausted and not self._under_way:
            self._runs = False

    @property
    def _under_way(self) -> int:
        """The number of requests for whose answers clients still wait."""
        return len(self._gateway) if self._api_server is None else self._api_server.under_way


def _check_ranks(config: FleetConfig, pools: Sequence[PricedPool]) -> None:
    """Raise UserError if an autoscaler or failures could start or end single data-parallel ranks of an engine."""
    for name, given in (("autoscaler", config.autoscaler), ("failures", config.failures != FailuresConfig())):
        if given and (ranks := max(pool.ranks for pool in pools)) > 1:
            remedy = f"cannot be combined with fleet.{name}, because ranks do not come and go alone; leave one out"
            raise UserError("data_parallel_size", ranks, remedy)


def _check_cuts(pools: Sequence[PricedPool]) -> None:
    """Raise UserError if a decode replica could take over a request that has all its tokens already."""
    if any(pool.deployment.scheduler.cut_at_max_model_len for pool in pools):
        remedy = "cannot be combined with pools for prefill and decode; set it to false"
        raise UserError("scheduler.cut_at_max_model_len", True, remedy)


def _check_reserving(pools: Sequence[PricedPool]) -> None:
    """Raise UserError if a decode replica could find KV in a prefix cache before the prompt is prefilled."""
    for pool in pools:
        if pool.config.role == "decode" and pool.deployment.scheduler.enable_prefix_caching:
            field = f"fleet.pools.{pool.config.name}.deployment.scheduler.enable_prefix_caching"
            raise UserError(field, True, "must be false with decode_reserves: before-prefill, as in SGLang")


@contextmanager
def _no_cycle_search() -> Iterator[None]:
    """Turn off Python's cyclic garbage collection, since requests leave no reference cycles.

    Garbage collection would take a third of the time of simulating a large fleet.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def simulate_to(
    out: str | Path,
    workload: Workload,
    deployment: Deployment,
    cost: CostModel,
    *,
    replicas: int = 1,
    fleet: FleetConfig | None = None,
    pools: Sequence[PricedPool] | None = None,
    calibration: str = "",
    usd_per_gpu_hour: Mapping[str, float | None] | None = None,
    seed: int = 0,
    steps: bool = True,
    tokens: bool = False,
    leaps: bool = False,
    front_door: FrontDoor | None = None,
    note: Callable[[Simulated, Recording], Mapping[str, Any]] | None = None,
    overwrite: bool = False,
) -> Simulated:
    """Simulate `workload` and write the recording `out` while the simulation runs.

    See `Cluster` for `replicas`, `fleet`, `pools`, `leaps` and `front_door`. The recorded deployment includes the
    fleet, whichever argument gave it, so that the run can be repeated. `usd_per_gpu_hour` maps pools to prices, None if
    unknown. `note` returns the notes of the run. Raises UserError if `out` exists and `overwrite` is not set.
    """
    fleet = fleet or deployment.fleet or plain_fleet(replicas)
    deployment = deployment.model_copy(update={"fleet": fleet})
    pools = pools or alike_pools(fleet, deployment, cost)
    schedulers = [pool.deployment.scheduler for pool in pools if pool.config.role != "encode"]
    run = {
        "run_id": Path(out).name,
        "clock": "virtual",
        "workload": workload.name,
        "deployment": deployment.model_dump_json(),
        "replicas": sum(pool.replicas for pool in fleet.pools),
        "seed": seed,
        "hardware": "",
        "calibration": calibration,
        "num_blocks": _common([scheduler.num_blocks - 1 for scheduler in schedulers]),
        "block_size": _common([scheduler.block_size for scheduler in schedulers]),
        "notes": "{}",
        "usd_per_gpu_hour": dict(usd_per_gpu_hour or {}),
    }
    with RecordingWriter(out, run, workload=workload, overwrite=overwrite) as writer:
        cluster = Cluster(
            deployment,
            cost,
            writer,
            pools=pools,
            shares_prefixes=workload.shares_prefixes,
            steps=steps,
            tokens=tokens,
            leaps=leaps,
            front_door=front_door,
        )
        done, replica_lives = cluster.run(workload), cluster.replica_lives
        del cluster  # free its memory, because `note` may simulate more
        noted = None if note is None else partial(note, done)
        writer.close(duration_ns=done.duration_ns, note=noted, replica_lives=replica_lives)
    return done


def _common(values: list[int]) -> int | None:
    """Return the value that all pools have; None if they differ."""
    return values[0] if len(set(values)) == 1 else None
