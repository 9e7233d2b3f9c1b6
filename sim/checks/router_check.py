"""A check that a router keeps its rules, by scripted workloads on fleets of every kind.

Each workload runs twice, and both runs must make equal choices. The check also reports how evenly requests are spread,
and whether a choice takes longer in a large fleet. Uneven shares and slow choices break no rule.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig, parse
from tokentwin.serving.deployments.fleet import FleetConfig
from tokentwin.serving.user_code.call_limit import CALL_LIMIT_S, Fault
from tokentwin.serving.workload import Workload, WorkloadRequest, shares_prefixes
from tokentwin.sim.checks.apart import run_apart
from tokentwin.sim.checks.requests import MS, requests, talks
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.router import ROUTERS, ReplicaSet, RouterBreach, find_router
from tokentwin.sim.run_log import TableSink

RULES = {
    "choice": "every choice is a replica that takes requests",
    "requests": "requests are not changed",
    "calls": "no call raises an error, and calls read only allowed attributes of replicas",
    "time": f"every call returns within {CALL_LIMIT_S:g} s, and the whole check within its limit",
    "determinism": "the same requests go to the same replicas",
}
_UNKNOWN = "not looked at: a rule is broken"
_COST = TokenCost(2_000_000, 20_000, 1_000, 100_000)
_ENGINE = SchedulerConfig(max_model_len=640, num_blocks=200, max_num_seqs=8, max_num_batched_tokens=256)
Settings = dict[str, int | float | str | bool]


@dataclass(frozen=True)
class RouterCheck:
    """The findings about `router`.

    Attributes:
        broken: for each rule, how it was broken; empty if it was kept
        spread: how requests were spread over four replicas
        grows: how the work of a choice grows with the fleet; None if it does not grow
    """

    router: str
    broken: dict[str, str]
    spread: str
    grows: str | None

    @property
    def holds(self) -> bool:
        return not any(self.broken.values())


@dataclass(frozen=True)
class _Script:
    """A workload, and the fleet that runs it."""

    name: str
    requests: list[WorkloadRequest]
    fleet: dict[str, Any]


def check_router_apart(name: str, settings: Settings, limit_s: float) -> RouterCheck:
    """Check the router called `name` in a process of its own, which may take `limit_s` seconds.

    Raises UserError if there is no such router, or it cannot be made with these settings.
    """
    try:
        checked: RouterCheck = run_apart(f"{__name__}:check_router", limit_s, name, settings)
    except Fault as error:
        return RouterCheck(name, {"time": error.what}, _UNKNOWN, None)
    return checked


def check_router(name: str, settings: Settings) -> RouterCheck:
    """Check the router called `name` with all scripts, in this process.

    Raises UserError if there is no such router, or it cannot be made with these settings.
    """
    place = ROUTERS.get(name, name)  # by its class, so that even a built-in router is checked fully
    find_router(place, **settings)
    broken = dict.fromkeys(RULES, "")
    spread, grows = _UNKNOWN, None
    for script in _scripts():
        rule, what = _broken(place, settings, script)
        if rule and not broken[rule]:
            broken[rule] = f"{script.name}: {what}"
    if not any(broken.values()):
        try:
            spread, grows = _spread(place, settings), _growing(place, settings)
        except RouterBreach as breach:
            broken[breach.rule] = f"a large fleet: {breach.remedy}"
    return RouterCheck(name, broken, spread, grows)


def _broken(router: str, settings: Settings, script: _Script) -> tuple[str, str]:
    """Return the rule that the router breaks in `script`, and how; two empty texts if it breaks none."""
    try:
        once, again = (_run(router, settings, script) for _ in range(2))
    except RouterBreach as breach:
        return breach.rule, breach.remedy
    for mine, theirs in zip(once, again, strict=True):
        if mine != theirs:
            what = f"request {mine['request_id']} went to replica {mine['replica']}, then to replica"
            return "determinism", f"{what} {theirs['replica']}"
    return "", ""


def _run(router: str, settings: Settings, script: _Script) -> list[dict[str, Any]]:
    fleet = parse(FleetConfig, {**script.fleet, "router": {"name": router, "settings": settings}}, where="fleet")
    sink, shares = TableSink(), shares_prefixes(script.requests)
    cluster = Cluster(Deployment(scheduler=_ENGINE, fleet=fleet), _COST, sink, shares_prefixes=shares, steps=False)
    cluster.run(Workload(script.requests, shares_prefixes=shares))
    return sink.requests.sort_by("request_id").to_pylist()


def _scripts() -> Iterator[_Script]:
    plain = requests(0, 60, every_ms=6, prompt=(20, 200), output=(1, 60))
    four: dict[str, Any] = {"pools": [{"replicas": 4}]}
    yield _Script("one replica", plain[:10], {})
    yield _Script("four alike", plain, four)
    turns = [replace(r, session=f"s{r.id % 7}", turn=r.id // 7) for r in talks(plain)]
    yield _Script("sessions and shared prefixes", turns, four)
    bursts = [replace(r, arrival_ns=r.id // 20 * 400 * MS) for r in plain]
    yield _Script("bursts, queues at their limit", bursts, {**four, "admission": {"max_queued_per_replica": 2}})
    yield _Script("impatient users", bursts, {**four, "admission": {"patience": {"mean_s": 0.2, "until": "finish"}}})
    classes = [{"name": "chat", "replicas": 2, "slo_classes": ["chat"]}, {"name": "rest", "replicas": 2, "speed": 0.5}]
    yield _Script("a pool of its own for chats", plain, {"pools": classes})
    crashes = [{"at_s": at, "replica": one, "recovery_s": 0.1} for at, one in ((0.05, 3), (0.15, 0), (0.2, 1))]
    scaler = {"metric": "queue", "target": 1, "max_replicas": 6, "interval_s": 0.05, "cold_start_s": 0.1}
    yield _Script("replicas come and go", plain, {**four, "failures": {"crashes": crashes}, "autoscaler": scaler})
    apart = [{"name": role, "role": role, "replicas": 2} for role in ("prefill", "decode")]
    yield _Script("prefill and decode apart", plain, {"pools": apart, "links": {"kv_bytes_per_token": 100_000}})


def _spread(router: str, settings: Settings) -> str:
    """Return text about how requests were spread over four equal replicas."""
    script = next(script for script in _scripts() if script.name == "four alike")
    by_replica = Counter(row["replica"] for row in _run(router, settings, script))
    counts = ", ".join(str(by_replica[index]) for index in range(4))
    return f"{counts} of {len(script.requests)} requests went to four replicas that are alike"


def _growing(router: str, settings: Settings) -> str | None:
    small, large = (_calls(router, settings, replicas) for replicas in (8, 128))
    return None if large <= 1.5 * small else f"{small // 16} calls among 8 replicas, {large // 16} among 128"


def _calls(router: str, settings: Settings, replicas: int) -> int:
    """Return the number of Python calls in 16 choices, made after 16 others."""
    members, chooser = ReplicaSet(), find_router(router, **settings)
    for replica in Cluster(Deployment(scheduler=_ENGINE), _COST, TableSink(), replicas=replicas).replicas:
        members.join(replica)
    counted = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    arriving = requests(1, 32, every_ms=5, prompt=(20, 200), output=(1, 60))
    before = sys.getprofile()
    for request in arriving[:16]:
        chooser.choose(request, members)
    sys.setprofile(count)
    try:
        for request in arriving[16:]:
            chooser.choose(request, members)
    finally:
        sys.setprofile(before)
    return counted
