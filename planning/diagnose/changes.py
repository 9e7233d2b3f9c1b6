"""What can be set or bought against a cause, and the command that shows its worth request by request.

A lift says what is to blame, most often by an ideal that nobody sells. Changes are settings of the deployment as
`tokentwin compare --b NAME=VALUE` takes them, each simulated before it is recommended.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from calibration.steps.observed import JudgedCost, pure
from calibration.steps.operation_cost import OperationCost
from planning.diagnose.constraint_lifts import longest_request, rescheduled, small_blocks, smaller_chunks
from planning.diagnose.fleet_lifts import resized, split_towards
from planning.priced_scenario import PricedScenario, price_scenario
from planning.repricing import Source
from planning.settings import with_settings
from serving.deployments.config import Deployment, SchedulerConfig
from serving.deployments.fleet import AutoscalerConfig, FleetConfig
from serving.deployments.inter_node import InterNodeConfig
from serving.deployments.kv_capacity import kv_capacity
from serving.deployments.model_catalogue import find_model
from serving.errors import UserError

Settings = Mapping[str, Any]
_OF_THE_RUN = ("gpu", "replicas", "router")  # what `compare` takes beside settings of a deployment
_ALL2ALL = "allgather_reducescatter"
_UTILISATION = 0.9  # of a GPU's memory: what engines take by default, and
_MORE = 0.02  # by how much a run has to be below it before more is worth a try


def changes(scenario: PricedScenario, cause: str) -> list[Settings]:
    """Candidates against `cause`, the name of a lift, and other numbers of replicas that prefill and that decode."""
    against = [*_against(scenario, cause), *_other_roles(scenario.deployment.fleet)]
    return [settings for at, settings in enumerate(against) if settings and settings not in against[:at]]


def _against(scenario: PricedScenario, cause: str) -> Iterator[Settings]:
    deployment, scheduler = scenario.deployment, scenario.deployment.scheduler
    tp, pp = deployment.tensor_parallel_size, deployment.pipeline_parallel_size
    share = share_of_memory(scenario)
    memory: Settings = (
        {} if share is None else {"gpu_memory_utilization": share}
    )  # KV blocks follow from the same share
    more_memory: Settings = {"gpu_memory_utilization": _UTILISATION} if share and share < _UTILISATION - _MORE else {}
    narrow_kv = {"kv_cache_dtype": "fp8", **memory} if memory and deployment.kv_cache_dtype == "auto" else {}
    match cause:
        case "more running requests":
            active: Settings = {} if scheduler.max_num_active_seqs is None else {"max_num_active_seqs": None}
            yield from ({"max_num_seqs": times * scheduler.most_running, **active} for times in (2, 8))
        case "smaller chunks":
            smaller = smaller_chunks(scenario).deployment.scheduler
            yield {"enable_chunked_prefill": True, "max_num_batched_tokens": smaller.max_num_batched_tokens}
            yield {"enable_chunked_prefill": True, "long_prefill_token_threshold": smaller.max_num_batched_tokens}
        case "prompts in one piece":
            yield {"long_prefill_token_threshold": 0} if scheduler.long_prefill_token_threshold else {}
            yield {"max_num_batched_tokens": max(scheduler.max_num_batched_tokens, scheduler.max_model_len)}
        case "policy vllm":
            yield {"policy": "vllm"}
        case "routing by load" | "no failures":
            yield _routed(scenario, "least-tokens") if scenario.routes_by != "least-tokens" else {}
            if deployment.fleet and deployment.fleet.router.settings and not scenario.router:
                yield {"fleet.router": scenario.routes_by}  # as it is by default
        case "longer sequences":
            longest = max(longest_request(scenario), scheduler.max_model_len)
            whole = {} if scheduler.enable_chunked_prefill else {"max_num_batched_tokens": longest}
            yield {"max_model_len": longest, **whole}
        case "no drafts":
            yield {"speculative": None}
        case "fused kernels":
            yield {"attention": "auto", "fusion": True}
        case "new replicas at once":
            yield from _sooner(deployment.fleet)
        case "more prefill replicas" | "more decode replicas":
            assert deployment.fleet is not None  # the lift applied
            yield _pools(deployment.fleet, split_towards(deployment.fleet, cause.split()[1]))
        case "perfect prefix reuse":
            caching = {} if scheduler.enable_prefix_caching else {"enable_prefix_caching": True}
            yield {**caching, **(_routed(scenario, "prefix-affinity") if scenario.engines > 1 else {})}
            yield more_memory
            yield narrow_kv
        case "no admission limits":
            yield {"fleet.admission": {"patience": _dumped(deployment.fleet, "patience")}}
        case "small KV blocks":
            smaller_blocks = small_blocks(scenario)
            if isinstance(smaller_blocks, PricedScenario):
                held = smaller_blocks.deployment.scheduler
                yield {"block_size": held.block_size, "num_blocks": held.num_blocks}
        case "paged KV memory":
            yield {"kv_reservation": "paged"} | (
                {"kv_reserved_max_tokens": 0} if scheduler.kv_reserved_max_tokens else {}
            )
        case "instant KV transfers":
            yield narrow_kv
            yield {"fleet": {"pools": [{"replicas": scenario.engines}], "router": scenario.routes_by}}
        case "instant KV tiers":
            yield {"kv_tiers": None}
            yield more_memory
            yield narrow_kv
        case "infinite KV memory" | "half the KV to read":
            yield more_memory
            yield narrow_kv
            yield {"tensor_parallel_size": 2 * tp, **memory} if memory else {}
        case "free communication":
            yield {"tensor_parallel_size": tp // 2, **memory} if memory and tp > 1 else {}
            yield from _less_communication(scenario, memory)
        case "no pipeline bubbles":
            yield _faster_link(deployment)
            yield {"pipeline_parallel_size": 1, "tensor_parallel_size": tp * pp, **memory}
        case "free launches":
            yield {"enforce_eager": False} if deployment.enforce_eager else {}
            yield {"tensor_parallel_size": tp // 2, **memory} if memory and tp > 1 else {}
        case "no CPU time between steps":
            yield {} if scheduler.async_scheduling else {"async_scheduling": True}
        case "half the weights to read" | "free prefill":
            yield {"quantization": "fp8", **memory} if memory and deployment.quantization == "none" else {}
            yield {"tensor_parallel_size": 2 * tp, **memory} if memory else {}


def share_of_memory(scenario: PricedScenario) -> float | None:
    """The gpu_memory_utilization that gives the KV blocks of `scenario`; None where no GPU's memory is known."""
    behind = pure(scenario.cost) if isinstance(scenario.cost, JudgedCost) else None
    if not isinstance(behind, OperationCost):
        return None
    deployment = scenario.deployment
    capacity = kv_capacity(find_model(deployment.model), behind.kernels.gpu, deployment)
    return capacity.share_for(deployment.scheduler.num_blocks)


def changed(scenario: PricedScenario, source: Source | None, settings: Settings) -> PricedScenario:
    """`scenario` with other settings, timed by `source`; without one, only settings of the scheduler can change.

    Raises UserError for what does not go together.
    """
    own = {name: value for name, value in settings.items() if name not in _OF_THE_RUN}
    deployment = with_settings(scenario.deployment, own)
    replicas, router = settings.get("replicas", scenario.replicas), settings.get("router", scenario.router)
    if source is None:
        if not own.keys() <= SchedulerConfig.model_fields.keys() or scenario.deployment.fleet:
            raise UserError("calibration", None, "is missing, so that other deployments cannot be timed")
        made = rescheduled(scenario, **{name: getattr(deployment.scheduler, name) for name in own})
        return PricedScenario(made.workload, made.deployment, made.all_pools[0].cost, replicas, router)
    alone = None if deployment.fleet else replicas
    gpu = settings.get("gpu", source.gpu)
    return price_scenario(scenario.workload, source.calibration, gpu, deployment, alone, router)


def _routed(scenario: PricedScenario, router: str) -> Settings:
    return {"fleet.router": router} if scenario.deployment.fleet and not scenario.router else {"router": router}


def both_sides(scenario: PricedScenario) -> dict[str, Any]:
    """What `compare` must be told of the run as it was beside its deployment."""
    found: dict[str, Any] = {"router": scenario.router} if scenario.router else {}
    return found if scenario.deployment.fleet or scenario.replicas == 1 else found | {"replicas": scenario.replicas}


def one_more(scenario: PricedScenario) -> Settings:
    """One more replica, in the first pool of each role, where no autoscaler sets their number."""
    fleet = scenario.deployment.fleet
    if fleet is None:
        return {"replicas": scenario.replicas + 1}
    return _pools(fleet, {pool.role: 1 for pool in fleet.pools})


def _other_roles(fleet: FleetConfig | None) -> Iterator[Settings]:
    if fleet and fleet.prefills_apart and not fleet.autoscaler:
        for role in ("prefill", "decode"):
            yield _pools(fleet, {role: 1})
            yield _pools(fleet, split_towards(fleet, role))


def _pools(fleet: FleetConfig, more: Mapping[str, int]) -> Settings:
    """Nothing where nothing is more."""
    if not more:
        return {}
    return {"fleet.pools": [pool.model_dump(mode="json", exclude_defaults=True) for pool in resized(fleet, more)]}


def _less_communication(scenario: PricedScenario, memory: Settings) -> Iterator[Settings]:
    """A link that keeps up, another exchange of tokens between experts, or engines on their own."""
    plain = {"all2all_backend": _ALL2ALL}
    deployment, node = scenario.deployment, scenario.deployment.inter_node
    faster = _faster_link(deployment)
    yield faster
    if deployment.data_parallel_size == 1:
        return
    rdma = {} if node is None or node.rdma else faster
    if deployment.enable_expert_parallel and deployment.all2all_backend == _ALL2ALL:
        yield from ({"all2all_backend": f"deepep_{mode}", **rdma} for mode in ("low_latency", "high_throughput"))
    fleet, more = deployment.fleet, scenario.engines * (deployment.data_parallel_size - 1)
    if fleet is None or not (fleet.autoscaler or len(fleet.pools) > 1):
        engines = _pools(fleet, {"serve": more}) if fleet else {"replicas": scenario.replicas + more}
        alone: Settings = {"data_parallel_size": 1, "enable_expert_parallel": False, "inter_node": None, **plain}
        apart = {name: value for name, value in alone.items() if getattr(deployment, name) != value}
        yield {**apart, **engines, **memory}


def _faster_link(deployment: Deployment) -> Settings:
    """Between nodes, an adapter for each GPU; nothing where they have that, or the engine is within one."""
    node = deployment.inter_node
    if node is None or deployment.gpus <= node.gpus_per_node:
        return {}
    fast = InterNodeConfig(gpus_per_node=node.gpus_per_node)
    if node.of_a_device.bytes_per_s >= fast.of_a_device.bytes_per_s and not node.latency_us:
        return {}
    return {"inter_node": {"gpus_per_node": node.gpus_per_node, "link": fast.link}}


def _sooner(fleet: FleetConfig | None) -> Iterator[Settings]:
    """More replicas that are there from the start, up to as many as may be; or a quarter of the time to start one."""
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
    """As YAML has them: one needs no list."""
    kept = [scaler.model_dump(mode="json", exclude_defaults=True) for scaler in scalers]
    return kept if len(kept) > 1 else kept[0]


def _dumped(fleet: Any, name: str) -> Any:
    kept = getattr(fleet.admission, name)
    return kept and kept.model_dump(mode="json")
