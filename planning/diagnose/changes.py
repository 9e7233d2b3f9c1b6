"""What can be set or bought against a cause, and the command that shows its worth request by request.

A lift says what is to blame, most often by an ideal that nobody sells. Changes are settings of the deployment as
`tokentwin compare --b NAME=VALUE` takes them, each simulated before it is recommended.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from planning.diagnose.constraint_lifts import rescheduled, small_blocks, smaller_chunks
from planning.priced_scenario import PricedScenario, price_scenario
from planning.repricing import Source
from planning.settings import with_settings
from serving.deployments.config import SchedulerConfig
from serving.errors import UserError

Settings = Mapping[str, Any]
_OF_THE_RUN = ("gpu", "replicas", "router")  # what `compare` takes beside settings of a deployment
_UTILISATION = 0.9  # of the GPU's memory, from which KV blocks follow where weights or KV change


def changes(scenario: PricedScenario, cause: str) -> list[Settings]:
    """Candidates against `cause`, the name of a lift."""
    return [settings for settings in _against(scenario, cause) if settings]


def _against(scenario: PricedScenario, cause: str) -> Iterator[Settings]:
    deployment, scheduler = scenario.deployment, scenario.deployment.scheduler
    tp, pp = deployment.tensor_parallel_size, deployment.pipeline_parallel_size
    memory = {"gpu_memory_utilization": _UTILISATION} if scenario.gpu else {}
    narrow_kv = {"kv_cache_dtype": "fp8", **memory} if memory and deployment.kv_cache_dtype == "auto" else {}
    match cause:
        case "more running requests":
            yield from ({"max_num_seqs": times * scheduler.max_num_seqs} for times in (2, 8))
        case "smaller chunks":
            smaller = smaller_chunks(scenario).deployment.scheduler
            yield {"enable_chunked_prefill": True, "max_num_batched_tokens": smaller.max_num_batched_tokens}
        case "prompts in one piece":
            yield {"max_num_batched_tokens": max(scheduler.max_num_batched_tokens, scheduler.max_model_len)}
        case "routing by load":
            yield _routed(scenario, "least-tokens")
        case "perfect prefix reuse":
            caching = {} if scheduler.enable_prefix_caching else {"enable_prefix_caching": True}
            yield {**caching, **(_routed(scenario, "prefix-affinity") if scenario.engines > 1 else {})}
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
            yield narrow_kv
        case "infinite KV memory" | "half the KV to read":
            yield narrow_kv
            yield {"tensor_parallel_size": 2 * tp, **memory} if memory else {}
        case "free communication":
            yield {"tensor_parallel_size": tp // 2, **memory} if memory and tp > 1 else {}
        case "no pipeline bubbles":
            yield {"pipeline_parallel_size": 1, "tensor_parallel_size": tp * pp, **memory}
        case "free launches":
            yield {"enforce_eager": False} if deployment.enforce_eager else {}
            yield {"tensor_parallel_size": tp // 2, **memory} if memory and tp > 1 else {}
        case "no CPU time between steps":
            overlaps = scheduler.async_scheduling or pp > 1
            yield {} if overlaps else {"async_scheduling": True}
        case "half the weights to read" | "free prefill":
            yield {"quantization": "fp8", **memory} if memory and deployment.quantization == "none" else {}
            yield {"tensor_parallel_size": 2 * tp, **memory} if memory else {}


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
    pools = [pool.model_dump(mode="json", exclude_defaults=True) for pool in fleet.pools]
    first = {pool.role: kept for pool, kept in reversed([*zip(fleet.pools, pools, strict=True)])}
    for kept in first.values():
        kept["replicas"] = kept.get("replicas", 1) + 1
    return {"fleet.pools": pools}


def _dumped(fleet: Any, name: str) -> Any:
    kept = getattr(fleet.admission, name)
    return kept and kept.model_dump(mode="json")
