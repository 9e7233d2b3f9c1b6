"""Lifts of constraints around the engines: routing, admission, failures, links, and the number of replicas.

Each lift takes a scenario and returns the scenario without the constraint, or the reason why it does not apply
(`constraint_lifts`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokentwin.planning.priced_scenario import PricedScenario
from tokentwin.serving.deployments.fleet import AdmissionConfig, FailuresConfig, FleetConfig, LinksConfig, PoolConfig

FASTEST = 1e9  # highest GB/s of a link
_BALANCING = ("power-of-two", "least-requests", "least-tokens", "kv-aware")
_NOT_APART, _SCALED = "there are no separate prefill and decode pools", "the autoscaler sets the number of replicas"


def instant_transfers(scenario: PricedScenario) -> PricedScenario | str:
    """Let the transfer of KV to the decode replica take no time, once the replica has blocks for it."""
    fleet = scenario.deployment.fleet
    if fleet is None or not fleet.prefills_apart:
        return _NOT_APART
    own = fleet.links or LinksConfig()
    fast = own.model_copy(update={"nic_gb_s": FASTEST, "fabric_gb_s": None, "latency_us": 0.0})
    return _with_fleet(scenario, fleet, links=fast)


def more_replicas(scenario: PricedScenario, count: int = 1) -> PricedScenario | str:
    """Add `count` engines behind the router; in a fleet, add as many replicas to the first pool of each role."""
    fleet = scenario.deployment.fleet
    if fleet is None:
        return replace(scenario, replicas=scenario.replicas + count)
    return _SCALED if fleet.autoscaler else _resized(scenario, fleet, {pool.role: count for pool in fleet.pools})


def another_split(scenario: PricedScenario, more: str) -> PricedScenario | str:
    """Move one replica from decode to prefill, or the other way round."""
    fleet = scenario.deployment.fleet
    if fleet is None or not fleet.prefills_apart:
        return _NOT_APART
    if fleet.autoscaler:
        return _SCALED
    fewer = split_towards(fleet, more)
    return _resized(scenario, fleet, fewer) if fewer else "every pool of the other role has one replica"


def split_towards(fleet: FleetConfig, more: str) -> dict[str, int]:
    """Return the argument of `resized` that moves a replica to the role `more`; empty if no other can spare one."""
    others = [pool for pool in fleet.pools if pool.role not in (more, "encode")]
    spare = next((pool.role for pool in others if pool.replicas > 1), None)
    return {more: 1, spare: -1} if spare else {}


def resized(fleet: FleetConfig, more: Mapping[str, int]) -> tuple[PoolConfig, ...]:
    """Return the pools of `fleet`, where the first possible pool of each role gets `more` replicas of that role."""
    left, pools = dict(more), []
    for pool in fleet.pools:
        extra = left.pop(pool.role, 0) if pool.replicas + left.get(pool.role, 0) > 0 else 0
        pools.append(pool.model_copy(update={"replicas": pool.replicas + extra}))
    return tuple(pools)


def _resized(scenario: PricedScenario, fleet: FleetConfig, more: Mapping[str, int]) -> PricedScenario:
    larger = resized(fleet, more)
    pools = scenario.pools
    if pools is not None:
        pools = tuple(replace(pool, config=config) for pool, config in zip(pools, larger, strict=True))
    return replace(_with_fleet(scenario, fleet, pools=larger), pools=pools)


def scaled_at_once(scenario: PricedScenario) -> PricedScenario | str:
    """Let autoscalers decide at least every second, and let new replicas be ready at once."""
    fleet = scenario.deployment.fleet
    if fleet is None or fleet.autoscaler is None:
        return "no autoscaler adds replicas"
    fast = [s.model_copy(update={"cold_start_s": 0.0, "interval_s": min(s.interval_s, 1.0)}) for s in fleet.autoscaler]
    return _with_fleet(scenario, fleet, autoscaler=tuple(fast))


def better_routing(scenario: PricedScenario) -> PricedScenario | str:
    """Route each request to the replica with the fewest outstanding tokens."""
    if scenario.engines == 1:
        return "there is one replica"
    if scenario.routes_by in _BALANCING:
        return f"the router {scenario.routes_by} already balances loads"
    return replace(scenario, router="least-tokens")


def everyone_admitted(scenario: PricedScenario) -> PricedScenario | str:
    """Remove limits of queues and time-outs of queued requests; users may still give up."""
    fleet = scenario.deployment.fleet
    own = fleet.admission if fleet else AdmissionConfig()
    spared = AdmissionConfig(patience=own.patience, retry=own.retry)
    if fleet is None or own == spared:
        return "nothing limits admission"
    return _with_fleet(scenario, fleet, admission=spared)


def no_failures(scenario: PricedScenario) -> PricedScenario | str:
    """Let no replica crash or slow down, and no link fail."""
    fleet = scenario.deployment.fleet
    if fleet is None or fleet.failures in (FailuresConfig(), FailuresConfig(seed=fleet.failures.seed)):
        return "nothing fails"
    return _with_fleet(scenario, fleet, failures=FailuresConfig())


def no_front_door(scenario: PricedScenario) -> PricedScenario | str:
    """Let tokenising and detokenising take no time, and let no API server compete with the engine for CPU time."""
    return "the run has no API server" if scenario.front_door is None else replace(scenario, front_door=None)


def _with_fleet(scenario: PricedScenario, fleet: FleetConfig, **changes: Any) -> PricedScenario:
    changed = {"fleet": fleet.model_copy(update=changes)}
    return replace(scenario, deployment=scenario.deployment.model_copy(update=changed))
