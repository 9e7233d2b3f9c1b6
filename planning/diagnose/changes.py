"""Changes of settings or hardware that may remove a cause. Each is simulated before it is recommended.

A lift shows the cause, usually with an ideal that does not exist. Changes are settings of the deployment in the form of
`tokentwin compare --b NAME=VALUE`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tokentwin.calibration.steps.observed import JudgedCost, pure
from tokentwin.calibration.steps.operation_cost import OperationCost
from tokentwin.planning.deployments import with_settings
from tokentwin.planning.diagnose.constraint_lifts import (
    adapter_slots,
    longest_request,
    rescheduled,
    small_blocks,
    smaller_chunks,
)
from tokentwin.planning.diagnose.fleet_lifts import resized, split_towards
from tokentwin.planning.priced_scenario import PricedScenario, price_scenario
from tokentwin.planning.repricing import Source
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.deployments.context_parallel import devices_with_same_kv
from tokentwin.serving.deployments.editions import stored_by_name
from tokentwin.serving.deployments.engines import BLOCK_SIZE
from tokentwin.serving.deployments.fleet import AutoscalerConfig, FleetConfig, PoolConfig, plain_fleet
from tokentwin.serving.deployments.inter_node import InterNodeConfig
from tokentwin.serving.deployments.kv_capacity import kv_capacity
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.errors import UserError

Settings = Mapping[str, Any]
_OF_THE_RUN = ("gpu", "replicas", "router")  # settings that `compare` takes besides those of a deployment
_ALL2ALL = "allgather_reducescatter"
_UTILISATION = 0.9  # share of a GPU's memory that engines take by default
_MORE = 0.02  # a run's share must be this much lower before a larger share is worth a try


def changes(scenario: PricedScenario, cause: str) -> list[Settings]:
    """Return changes to try against `cause`, a lift's name, and other splits of replicas into prefill and decode."""
    against = _AGAINST.get(cause)
    own = against(_Case(scenario, cause)) if against else ()
    candidates = [*own, *_other_roles(scenario.deployment.fleet)]
    return [settings for at, settings in enumerate(candidates) if settings and settings not in candidates[:at]]


class _Case:
    """A run and the cause of its slowness. Empty settings change nothing and are left out.

    Attributes:
        memory: setting of the share of a GPU's memory that gives as many KV blocks as now; empty if it is not known
        more_memory: setting of the share that engines take by default, if this run takes less; else empty
        narrow_kv: setting of one byte per KV value, if it has two and the KV blocks follow from the memory; else empty
    """

    def __init__(self, scenario: PricedScenario, cause: str) -> None:
        self.scenario = scenario
        self.cause = cause
        self.deployment = scenario.deployment
        self.scheduler = scenario.deployment.scheduler
        self.fleet = scenario.deployment.fleet
        share = share_of_memory(scenario)
        self.memory: Settings = {} if share is None else {"gpu_memory_utilization": share}
        self.more_memory: Settings = {}
        if share and share < _UTILISATION - _MORE:
            self.more_memory = {"gpu_memory_utilization": _UTILISATION}
        self.narrow_kv: Settings = {}
        if self.memory and self.deployment.kv_cache_dtype == "auto":
            self.narrow_kv = {"kv_cache_dtype": "fp8", **self.memory}

    def tensor_parallel(self, factor: float) -> Settings:
        """Return `factor` times the GPUs per layer; empty if their memory is not known, or the number is impossible."""
        size = self.deployment.tensor_parallel_size * factor
        return {"tensor_parallel_size": int(size), **self.memory} if self.memory and size >= 1 else {}

    @property
    def shared_kv(self) -> Settings:
        """The setting by which devices share KV of which all hold copies; empty if there is nothing to share."""
        deployment, refused = self.deployment, self.scheduler.speculative or self.deployment.lora
        if not self.memory or refused or deployment.prefill_context_parallel_size > 1:
            return {}
        same = devices_with_same_kv(find_model(deployment.model), deployment.tensor_parallel_size)
        if same in (1, deployment.decode_context_parallel_size):
            return {}
        return {"decode_context_parallel_size": same, "block_size": same * BLOCK_SIZE, **self.memory}


def _more_running_requests(case: _Case) -> Iterator[Settings]:
    active: Settings = {} if case.scheduler.max_num_active_seqs is None else {"max_num_active_seqs": None}
    yield from ({"max_num_seqs": times * case.scheduler.most_running, **active} for times in (2, 8, 64))


def _more_adapter_slots(case: _Case) -> Iterator[Settings]:
    wide = adapter_slots(case.scenario)
    lora, whole = case.deployment.lora, None if isinstance(wide, str) else wide.deployment.lora
    if lora is not None and whole is not None:
        for slots in (2 * lora.max_loras, whole.max_loras):
            more = {**lora.model_dump(exclude_defaults=True), "max_loras": slots}
            yield {"lora": {**more, "max_cpu_loras": max(slots, lora.host_loras)}, **case.memory}
    if case.scenario.engines > 1:
        yield _routed(case.scenario, "adapter-affinity")


def _smaller_chunks(case: _Case) -> Iterator[Settings]:
    budget = smaller_chunks(case.scenario).deployment.scheduler.max_num_batched_tokens
    yield {"enable_chunked_prefill": True, "max_num_batched_tokens": budget}
    yield {"enable_chunked_prefill": True, "long_prefill_token_threshold": budget}


def _prompts_in_one_piece(case: _Case) -> Iterator[Settings]:
    scheduler = case.scheduler
    if scheduler.long_prefill_token_threshold:
        yield {"long_prefill_token_threshold": 0}
    yield {"max_num_batched_tokens": max(scheduler.max_num_batched_tokens, scheduler.max_model_len)}


def _other_policy(case: _Case) -> Iterator[Settings]:
    yield {"policy": "vllm"}


def _other_router(case: _Case) -> Iterator[Settings]:
    if case.scenario.routes_by != "least-tokens":
        yield _routed(case.scenario, "least-tokens")
    if case.fleet and case.fleet.router.settings and not case.scenario.router:
        yield {"fleet.router": case.scenario.routes_by}  # the router without its settings


def _longer_sequences(case: _Case) -> Iterator[Settings]:
    longest = max(longest_request(case.scenario), case.scheduler.max_model_len)
    whole = {} if case.scheduler.enable_chunked_prefill else {"max_num_batched_tokens": longest}
    yield {"max_model_len": longest, **whole}


def _no_drafts(case: _Case) -> Iterator[Settings]:
    yield {"speculative": None}


def _fused_kernels(case: _Case) -> Iterator[Settings]:
    yield {"attention": "auto", "fusion": True}


def _more_of_a_role(case: _Case) -> Iterator[Settings]:
    assert case.fleet is not None  # the lift applied
    yield _pools(case.fleet, split_towards(case.fleet, case.cause.split()[1]))


def _more_encoders(case: _Case) -> Iterator[Settings]:
    """Yield one more encoder replica; without encoder replicas, one beside the engines, and one in place of an engine.

    An encoder replica has one GPU.
    """
    fleet = case.fleet or plain_fleet(case.scenario.replicas)
    if fleet.encodes_apart:
        yield _pools(fleet, {"encode": 1})
        return
    one_gpu = {name: 1 for name in ("tensor_parallel_size",) if getattr(case.deployment, name) > 1}
    for fewer in ({}, {"prefill" if fleet.prefills_apart else "serve": -1}):
        pools = resized(fleet, fewer)
        if all(pool.replicas for pool in pools):
            added = (*pools, PoolConfig(name="encode", role="encode", deployment=one_gpu))
            kept = [pool.model_dump(mode="json", exclude_defaults=True) for pool in added]
            yield {"fleet.pools": kept} if case.fleet else {"fleet": {"pools": kept, "router": case.scenario.routes_by}}


def _more_prefix_hits(case: _Case) -> Iterator[Settings]:
    caching = {} if case.scheduler.enable_prefix_caching else {"enable_prefix_caching": True}
    yield {**caching, **(_routed(case.scenario, "prefix-affinity") if case.scenario.engines > 1 else {})}
    yield case.more_memory
    yield case.narrow_kv


def _no_admission_limits(case: _Case) -> Iterator[Settings]:
    yield {"fleet.admission": {"patience": _dumped(case.fleet, "patience")}}


def _small_kv_blocks(case: _Case) -> Iterator[Settings]:
    smaller = small_blocks(case.scenario)
    if isinstance(smaller, PricedScenario):
        scheduler = smaller.deployment.scheduler
        yield {"block_size": scheduler.block_size, "num_blocks": scheduler.num_blocks}


def _paged_kv(case: _Case) -> Iterator[Settings]:
    unreserved = {"kv_reserved_max_tokens": 0} if case.scheduler.kv_reserved_max_tokens else {}
    yield {"kv_reservation": "paged", **unreserved}


def _no_kv_transfers(case: _Case) -> Iterator[Settings]:
    yield case.narrow_kv
    yield {"fleet": {"pools": [{"replicas": case.scenario.engines}], "router": case.scenario.routes_by}}


def _no_kv_tiers(case: _Case) -> Iterator[Settings]:
    yield {"kv_tiers": None}
    yield case.more_memory
    yield case.narrow_kv


def _more_kv(case: _Case) -> Iterator[Settings]:
    yield case.more_memory
    yield case.narrow_kv
    yield case.shared_kv
    yield case.tensor_parallel(2)


def _less_communication(case: _Case) -> Iterator[Settings]:
    """Yield fewer GPUs per layer, a faster link, another all-to-all exchange between experts, or separate engines."""
    yield case.tensor_parallel(1 / 2)
    plain = {"all2all_backend": _ALL2ALL}
    deployment, node = case.deployment, case.deployment.inter_node
    faster = _faster_link(deployment)
    yield faster
    if deployment.data_parallel_size == 1:
        return
    rdma = {} if node is None or node.rdma else faster
    if deployment.enable_expert_parallel and deployment.all2all_backend == _ALL2ALL:
        yield from ({"all2all_backend": f"deepep_{mode}", **rdma} for mode in ("low_latency", "high_throughput"))
    fleet, more = case.fleet, case.scenario.engines * (deployment.data_parallel_size - 1)
    if fleet is None or not (fleet.autoscaler or len(fleet.pools) > 1):
        engines = _pools(fleet, {"serve": more}) if fleet else {"replicas": case.scenario.replicas + more}
        alone: Settings = {"data_parallel_size": 1, "enable_expert_parallel": False, "inter_node": None, **plain}
        apart = {name: value for name, value in alone.items() if getattr(deployment, name) != value}
        yield {**apart, **engines, **case.memory}


def _no_pipeline(case: _Case) -> Iterator[Settings]:
    yield _faster_link(case.deployment)
    gpus = case.deployment.tensor_parallel_size * case.deployment.pipeline_parallel_size
    yield {"pipeline_parallel_size": 1, "tensor_parallel_size": gpus, **case.memory}


def _fewer_launches(case: _Case) -> Iterator[Settings]:
    if case.deployment.enforce_eager:
        yield {"enforce_eager": False}
    yield case.tensor_parallel(1 / 2)


def _overlapped_loop(case: _Case) -> Iterator[Settings]:
    if not case.scheduler.async_scheduling:
        yield {"async_scheduling": True}


def _less_to_compute(case: _Case) -> Iterator[Settings]:
    if case.memory and case.deployment.quantization == "none" and stored_by_name(case.deployment.model) is None:
        yield {"quantization": "fp8", **case.memory}
    yield case.tensor_parallel(2)


def share_of_memory(scenario: PricedScenario) -> float | None:
    """Return the gpu_memory_utilization that gives the number of KV blocks of `scenario`.

    Returns None if the memory of the GPU is not known.
    """
    behind = pure(scenario.cost) if isinstance(scenario.cost, JudgedCost) else None
    if not isinstance(behind, OperationCost):
        return None
    deployment = scenario.deployment
    capacity = kv_capacity(find_model(deployment.model), behind.kernels.gpu, deployment)
    return capacity.share_for(deployment.scheduler.num_blocks)


def changed(scenario: PricedScenario, source: Source | None, settings: Settings) -> PricedScenario:
    """Return `scenario` with other settings, timed by `source`; without a source, only scheduler settings can change.

    Raises UserError for settings that do not go together.
    """
    own = {name: value for name, value in settings.items() if name not in _OF_THE_RUN}
    deployment = with_settings(scenario.deployment, own)
    replicas, router = settings.get("replicas", scenario.replicas), settings.get("router", scenario.router)
    if source is None:
        if not own.keys() <= SchedulerConfig.model_fields.keys() or scenario.deployment.fleet:
            raise UserError("calibration", None, "is missing, so that other deployments cannot be timed")
        made = rescheduled(scenario, **{name: getattr(deployment.scheduler, name) for name in own})
        cost, door = made.all_pools[0].cost, scenario.front_door
        return PricedScenario(made.workload, made.deployment, cost, replicas, router, front_door=door)
    alone = None if deployment.fleet else replicas
    gpu = settings.get("gpu", source.gpu)
    made = price_scenario(scenario.workload, source.calibration, gpu, deployment, alone, router)
    return replace(made, front_door=scenario.front_door)


def _routed(scenario: PricedScenario, router: str) -> Settings:
    return {"fleet.router": router} if scenario.deployment.fleet and not scenario.router else {"router": router}


def both_sides(scenario: PricedScenario) -> dict[str, Any]:
    """Return the settings that `compare` needs, besides the deployment, to repeat the run as it was."""
    settings: dict[str, Any] = {"router": scenario.router} if scenario.router else {}
    if not scenario.deployment.fleet and scenario.replicas != 1:
        settings["replicas"] = scenario.replicas
    return settings


def replicas_setting(scenario: PricedScenario, count: int = 1) -> Settings:
    """Return the setting of `count` more replicas; in a fleet, it adds them to the first pool of each role."""
    fleet = scenario.deployment.fleet
    if fleet is None:
        return {"replicas": scenario.replicas + count}
    return _pools(fleet, {pool.role: count for pool in fleet.pools})


def _other_roles(fleet: FleetConfig | None) -> Iterator[Settings]:
    if fleet and fleet.prefills_apart and not fleet.autoscaler:
        for role in ("prefill", "decode"):
            yield _pools(fleet, {role: 1})
            yield _pools(fleet, split_towards(fleet, role))


def _pools(fleet: FleetConfig, more: Mapping[str, int]) -> Settings:
    """Return the setting of pools with `more` replicas for each role; empty if `more` is empty."""
    if not more:
        return {}
    return {"fleet.pools": [pool.model_dump(mode="json", exclude_defaults=True) for pool in resized(fleet, more)]}


def _faster_link(deployment: Deployment) -> Settings:
    """Return the setting of a link between nodes with a network adapter for each GPU.

    Returns empty settings if the nodes have such a link already, or if the engine fits into one node.
    """
    node = deployment.inter_node
    if node is None or deployment.gpus <= node.gpus_per_node:
        return {}
    fast = InterNodeConfig(gpus_per_node=node.gpus_per_node)
    if node.of_a_device.bytes_per_s >= fast.of_a_device.bytes_per_s and not node.latency_us:
        return {}
    return {"inter_node": {"gpus_per_node": node.gpus_per_node, "link": fast.link}}


def _sooner(case: _Case) -> Iterator[Settings]:
    """Yield more replicas from the start, up to the maximum number, or a quarter of the time to start a replica."""
    fleet = case.fleet
    assert fleet is not None and fleet.autoscaler is not None  # the lift applied
    for times in (2, math.inf):
        scalers, pools = [], list(fleet.pools)
        for scaler in fleet.autoscaler:
            at = fleet.pool_number(scaler.pool)
            least = min(times * max(scaler.min_replicas, pools[at].replicas), scaler.max_replicas)
            scalers.append(scaler.model_copy(update={"min_replicas": least}))
            pools[at] = pools[at].model_copy(update={"replicas": least})
        kept = [pool.model_dump(mode="json", exclude_defaults=True) for pool in pools]
        yield {"fleet.pools": kept, "fleet.autoscaler": _alone(scalers)}
    quick = [scaler.model_copy(update={"cold_start_s": scaler.cold_start_s / 4}) for scaler in fleet.autoscaler]
    yield {"fleet.autoscaler": _alone(quick)}


def _alone(scalers: Sequence[AutoscalerConfig]) -> Any:
    """Return the autoscalers as YAML states them: a list, or a single autoscaler without a list."""
    kept = [scaler.model_dump(mode="json", exclude_defaults=True) for scaler in scalers]
    return kept if len(kept) > 1 else kept[0]


def _dumped(fleet: Any, name: str) -> Any:
    kept = getattr(fleet.admission, name)
    return kept and kept.model_dump(mode="json")


_AGAINST: dict[str, Callable[[_Case], Iterator[Settings]]] = {
    "more running requests": _more_running_requests,
    "a slot for each adapter": _more_adapter_slots,
    "free encoding": _more_encoders,
    "smaller chunks": _smaller_chunks,
    "prompts in one piece": _prompts_in_one_piece,
    "policy vllm": _other_policy,
    "routing by load": _other_router,
    "no failures": _other_router,
    "longer sequences": _longer_sequences,
    "no drafts": _no_drafts,
    "fused kernels": _fused_kernels,
    "new replicas at once": _sooner,
    "more prefill replicas": _more_of_a_role,
    "more decode replicas": _more_of_a_role,
    "perfect prefix reuse": _more_prefix_hits,
    "no admission limits": _no_admission_limits,
    "small KV blocks": _small_kv_blocks,
    "paged KV memory": _paged_kv,
    "instant KV transfers": _no_kv_transfers,
    "instant KV tiers": _no_kv_tiers,
    "infinite KV memory": _more_kv,
    "half the KV to read": _more_kv,
    "free communication": _less_communication,
    "no pipeline bubbles": _no_pipeline,
    "free launches": _fewer_launches,
    "no CPU time between steps": _overlapped_loop,
    "half the weights to read": _less_to_compute,
    "free prefill": _less_to_compute,
}
"""What helps against a cause, by the name of the lift that shows it."""
