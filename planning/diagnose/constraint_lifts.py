"""Counterfactuals: the same run with one constraint lifted at a time.

A lift takes a scenario and gives the scenario without the constraint, or says in a few words why it does not apply.
What it would buy tells how much of a latency that constraint is to blame for; shares of several need not add up to one,
since constraints hide one another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from planning.diagnose.lifted_costs import repriced, twice_the_bandwidth, with_free_prefill, without_cpu_time
from planning.priced_scenario import PricedScenario
from planning.traffic import waits_for_answers
from serving.cost_model import CostModel
from serving.deployments.fleet import FailuresConfig
from serving.workload import Workload, WorkloadRequest
from sim.priced_pool import PricedPool

Lifecycle = Literal["token", "compute", "memory", "request"]
Kind = Literal["capacity", "policy"]

_MOST_BLOCKS = 10_000_000  # of a SchedulerConfig
_PLACES = 8  # times as many
_CHUNKS = 8  # times as small
_BLIND_ROUTERS = ("round-robin", "random")
_BURSTY = 1.5  # index of dispersion; Poisson arrivals have 1
_WINDOW = 20  # arrivals of a mean window of that index


@dataclass(frozen=True)
class Lift:
    """A constraint and how to lift it.

    name        what is lifted, as in "with ..."
    cause       what is wrong if that helps
    lifecycle   where it bites
    kind        what kind of problem it would be, which may depend on the scenario
    apply       the scenario without the constraint, or why there is no such thing
    """

    name: str
    cause: str
    lifecycle: Lifecycle
    kind: Callable[[PricedScenario], Kind]
    apply: Callable[[PricedScenario], PricedScenario | str]


def _capacity(scenario: PricedScenario) -> Kind:
    return "capacity"


def _policy(scenario: PricedScenario) -> Kind:
    return "policy"


def _of_cpu(scenario: PricedScenario) -> Kind:
    """An overlapped loop hides CPU time; what that leaves, and what a pipeline waits for, only a faster host can."""
    deployment = scenario.deployment
    can_overlap = not deployment.scheduler.async_scheduling and deployment.pipeline_parallel_size == 1
    return "policy" if can_overlap else "capacity"


def _of_prefixes(scenario: PricedScenario) -> Kind:
    """One engine that caches and still misses lacks memory; otherwise caching, or routing, is not what it could be."""
    caches = scenario.deployment.scheduler.enable_prefix_caching
    return "capacity" if caches and scenario.engines == 1 else "policy"


def infinite_kv(scenario: PricedScenario) -> PricedScenario:
    """KV blocks for every request that ever comes, so that nothing waits for memory or is evicted."""
    return _rescheduled(scenario, num_blocks=_all_blocks(scenario))


def free_prefill(scenario: PricedScenario) -> PricedScenario:
    """Prompts cost nothing."""
    return _recosted(scenario, with_free_prefill)


def no_cpu_time(scenario: PricedScenario) -> PricedScenario:
    """Nothing happens between steps."""
    return _recosted(scenario, without_cpu_time)


def double_bandwidth(scenario: PricedScenario) -> PricedScenario | str:
    """Memory is read twice as fast."""
    if any(twice_the_bandwidth(pool.cost) is None for pool in scenario.all_pools):
        return "the cost model does not say how step times depend on memory bandwidth"
    return _recosted(scenario, lambda cost: twice_the_bandwidth(cost) or cost)


def perfect_prefix_reuse(scenario: PricedScenario) -> PricedScenario | str:
    """Prefixes are cached, never evicted, and requests go to where theirs is."""
    if not scenario.workload.shares_prefixes:
        return "no request shares a prefix with another"
    kept = _rescheduled(scenario, enable_prefix_caching=True, num_blocks=_all_blocks(scenario))
    return replace(kept, router="prefix-affinity") if scenario.engines > 1 else kept


def one_more_replica(scenario: PricedScenario) -> PricedScenario | str:
    """One engine more behind the router; in a fleet, in the first pool of each role."""
    fleet = scenario.deployment.fleet
    if fleet is None:
        return replace(scenario, replicas=scenario.replicas + 1)
    if fleet.autoscaler is not None:
        return "the autoscaler sets the number of replicas"
    first = {pool.role: at for at, pool in reversed([*enumerate(fleet.pools)])}
    larger = tuple(
        pool.model_copy(update={"replicas": pool.replicas + 1}) if first[pool.role] == at else pool
        for at, pool in enumerate(fleet.pools)
    )
    pools = scenario.pools
    if pools is not None:
        pools = tuple(replace(pool, config=config) for pool, config in zip(pools, larger, strict=True))
    grown = fleet.model_copy(update={"pools": larger})
    return replace(scenario, deployment=scenario.deployment.model_copy(update={"fleet": grown}), pools=pools)


def smaller_chunks(scenario: PricedScenario) -> PricedScenario:
    """Prompts in chunks of an eighth of a step's tokens, as far as that leaves room for every decode."""
    scheduler = scenario.deployment.scheduler
    had = scheduler.max_num_batched_tokens
    budget = max(had // _CHUNKS, min(scheduler.max_num_seqs, had))
    return _rescheduled(scenario, enable_chunked_prefill=True, max_num_batched_tokens=budget)


def whole_prompts(scenario: PricedScenario) -> PricedScenario | str:
    """Prompts are not cut."""
    scheduler = scenario.deployment.scheduler
    if not scheduler.enable_chunked_prefill:
        return "no prompt is cut in this run"
    budget = max(scheduler.max_num_batched_tokens, scheduler.max_model_len)
    return _rescheduled(scenario, enable_chunked_prefill=False, max_num_batched_tokens=budget)


def more_places(scenario: PricedScenario) -> PricedScenario:
    """Eight times as many requests may run at once."""
    return _rescheduled(scenario, max_num_seqs=_PLACES * scenario.deployment.scheduler.max_num_seqs)


def better_routing(scenario: PricedScenario) -> PricedScenario | str:
    """Requests go to the replica with the fewest tokens left."""
    if scenario.engines == 1:
        return "there is one replica"
    if scenario.routes_by not in _BLIND_ROUTERS:
        return f"{scenario.routes_by} already balances loads"
    return replace(scenario, router="least-tokens")


def even_arrivals(scenario: PricedScenario) -> PricedScenario | str:
    """The same requests in the same order, evenly spaced over the same time."""
    requests = list(scenario.workload.requests)
    if waits_for_answers(scenario.workload):
        return "arrivals depend on answers"
    if dispersion(requests) < _BURSTY:
        return "arrivals are no burstier than Poisson's"
    first, last = requests[0].arrival_ns, requests[-1].arrival_ns
    gaps = max(len(requests) - 1, 1)
    spaced = [replace(r, arrival_ns=first + (last - first) * i // gaps) for i, r in enumerate(requests)]
    return replace(scenario, workload=replace(scenario.workload, requests=spaced))


def no_failures(scenario: PricedScenario) -> PricedScenario | str:
    """No replica crashes or slows down, and no link is lost."""
    fleet = scenario.deployment.fleet
    if fleet is None or fleet.failures in (FailuresConfig(), FailuresConfig(seed=fleet.failures.seed)):
        return "nothing fails"
    spared = fleet.model_copy(update={"failures": FailuresConfig()})
    return replace(scenario, deployment=scenario.deployment.model_copy(update={"fleet": spared}))


PREFIXES, FREE_PREFILL, REPLICA = "perfect prefix reuse", "free prefill", "one more replica"
_CIRCUMSTANCES = (
    Lift("even arrivals", "arrivals come in bursts", "request", _capacity, even_arrivals),
    Lift("no failures", "replicas or links fail", "request", _capacity, no_failures),
    Lift(PREFIXES, "prefixes are computed again", "memory", _of_prefixes, perfect_prefix_reuse),
    Lift("more running requests", "max_num_seqs is too small", "request", _policy, more_places),
    Lift("smaller chunks", "long prompt chunks delay decodes", "token", _policy, smaller_chunks),
    Lift("prompts in one piece", "prompts are cut too small", "token", _policy, whole_prompts),
    Lift("routing by load", "the router loads replicas unevenly", "request", _policy, better_routing),
)
_RESOURCES = (
    Lift("infinite KV memory", "KV memory is too small", "memory", _capacity, infinite_kv),
    Lift(FREE_PREFILL, "prompts take the device's time", "compute", _capacity, free_prefill),
    Lift("no CPU time between steps", "the device waits for the CPU", "compute", _of_cpu, no_cpu_time),
    Lift("twice the memory bandwidth", "decoding waits for memory", "token", _capacity, double_bandwidth),
)
_EVERYTHING = (Lift(REPLICA, "there are too few replicas", "request", _capacity, one_more_replica),)
# From settings and what befalls the run, over one resource at a time, to what relieves all constraints at once.
TIERS = (_CIRCUMSTANCES, _RESOURCES, _EVERYTHING)


def dispersion(requests: list[WorkloadRequest]) -> float:
    """Index of dispersion of arrivals: variance over mean of their number in windows of 20 arrivals on average."""
    windows = len(requests) // _WINDOW
    first, last = requests[0].arrival_ns, requests[-1].arrival_ns
    if windows < 2 or last <= first:
        return 1.0
    window = [min((request.arrival_ns - first) * windows // (last - first), windows - 1) for request in requests]
    counts = np.bincount(window, minlength=windows)
    return float(counts.var(ddof=1) / counts.mean())


def _rescheduled(scenario: PricedScenario, **changes: Any) -> PricedScenario:
    """With other settings of the scheduler, on every engine."""

    def repriced_pool(pool: PricedPool) -> PricedPool:
        deployment = pool.deployment.rescheduled(**changes)
        return replace(pool, deployment=deployment, cost=repriced(pool.cost, deployment))

    pools = tuple(map(repriced_pool, scenario.all_pools))
    return replace(scenario, deployment=scenario.deployment.rescheduled(**changes), pools=pools)


def _recosted(scenario: PricedScenario, wrapped: Callable[[CostModel], CostModel]) -> PricedScenario:
    return replace(scenario, pools=tuple(replace(pool, cost=wrapped(pool.cost)) for pool in scenario.all_pools))


def _all_blocks(scenario: PricedScenario) -> int:
    """Blocks for all tokens of the workload and the null block, as far as a pool may have so many."""
    config, had = scenario.deployment.scheduler, scenario.deployment.scheduler.num_blocks
    size, tables = config.block_size, max(len(config.kv_groups), 1)
    needed = tables * sum(-(-(r.prompt_len + r.output_len) // size) for r in scenario.workload.requests)
    return max(min(needed + 1, _MOST_BLOCKS), had)


def offered(workload: Workload) -> Workload:
    """`workload` with its requests held, since every counterfactual goes through them again."""
    return replace(workload, requests=list(workload.requests))
