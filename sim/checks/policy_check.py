"""A check that a policy keeps its contract, by scripted workloads in both loops.

Each workload runs twice step by step, and once with steady steps skipped. The three runs must agree to the nanosecond.
The check also reports whether requests can starve, and whether the time of planning a steady decode step grows with the
batch. Starving requests and slow planning do not break the contract.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tokentwin.serving.contract import Breach
from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.deployments.fleet import AdmissionConfig, FleetConfig, Patience
from tokentwin.serving.errors import UserError
from tokentwin.serving.scheduler import POLICIES, find_policy
from tokentwin.serving.user_code.call_limit import CALL_LIMIT_S, Fault
from tokentwin.serving.user_code.own_contract import contract_with
from tokentwin.serving.workload import Workload, WorkloadRequest, shares_prefixes
from tokentwin.sim.checks.apart import run_apart
from tokentwin.sim.checks.requests import MS, requests, talks
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink

RULES = {
    "budget": "steps stay within the deployment's limits of tokens and sequences",
    "KV": "requests hold enough KV blocks, and no more than the deployment has",
    "rows": "each row of a step has the next tokens of one running request",
    "sums": "sums of a step follow from its rows",
    "requests": "requests are not changed, and finish with all of their tokens",
    "progress": "steps are planned while requests wait",
    "promises": "steps that steady_steps() skips are the steps that would have been planned",
    "calls": "every call returns a valid value, and raises nothing",
    "time": f"every call returns within {CALL_LIMIT_S:g} s, and the whole check within its limit",
    "determinism": "the same requests give the same decisions",
}
LOOPS = {"plain": False, "overlapped": True}
_UNKNOWN = "not looked at: the contract does not hold"
_COST = TokenCost(2_000_000, 20_000, 1_000, 100_000)
_SLOW = TokenCost(100_000_000, 0, 0)


@dataclass(frozen=True)
class Finding:
    """A rule of the contract. `broken` says for each loop which workload broke it, and how; empty if it holds."""

    rule: str
    broken: dict[str, str]


@dataclass(frozen=True)
class PolicyCheck:
    """The findings about `policy`. `starves` is None if no request starves; `grows` is None if a step is O(1)."""

    policy: str
    findings: tuple[Finding, ...]
    starves: str | None
    grows: str | None

    @property
    def holds(self) -> bool:
        """True if the policy keeps the whole contract."""
        return not any(any(finding.broken.values()) for finding in self.findings)


@dataclass(frozen=True)
class _Script:
    """A workload, and engine limits that make it hard."""

    name: str
    requests: list[WorkloadRequest]
    limits: dict[str, Any]
    patience_s: float | None = None


def check_policy_apart(name: str, limit_s: float) -> PolicyCheck:
    """Check the policy called `name` in a process of its own, which may take `limit_s` seconds.

    Raises UserError if there is no such policy, or it cannot be made.
    """
    try:
        checked: PolicyCheck = run_apart(f"{__name__}:check_policy", limit_s, name)
    except Fault as error:
        hangs = Finding("time", dict.fromkeys(LOOPS, error.what))
        return PolicyCheck(name, (hangs,), _UNKNOWN, _UNKNOWN)
    return checked


def check_policy(name: str) -> PolicyCheck:
    """Check the policy called `name` with all scripts, in this process.

    Raises UserError if there is no such policy, or it cannot be made.
    """
    policy = POLICIES.get(name, name)  # by its class, so that even a built-in policy is checked fully
    made = find_policy(policy)
    for overlapped in LOOPS.values():
        made(SchedulerConfig(async_scheduling=overlapped))
    broken: dict[tuple[str, str], str] = {}
    starves: str | None = _UNKNOWN
    grows = starves
    for loop, overlapped, script in ((*loop, script) for loop in LOOPS.items() for script in _scripts()):
        rule, what = _broken(policy, script, overlapped)
        if rule:
            broken.setdefault((rule, loop), f"{script.name}: {what}")
    if not broken:
        try:
            starves, grows = _starved(policy), _growing(policy)
        except Breach as breach:
            broken[breach.rule, "plain"] = f"large batches, long queues: {breach.remedy}"
    findings = tuple(Finding(rule, {loop: broken.get((rule, loop), "") for loop in LOOPS}) for rule in RULES)
    return PolicyCheck(name, findings, starves, grows)


def _broken(policy: str, script: _Script, overlapped: bool) -> tuple[str, str]:
    """Return the rule that the policy breaks in `script`, and how; two empty texts if it breaks none."""
    try:
        once, again, skipping = (_ends(policy, script, overlapped, steps) for steps in (True, True, False))
    except Breach as breach:
        return breach.rule, breach.remedy
    except UserError as error:
        if isinstance(error.__context__, Fault):  # the policy cannot be imported or made
            return "calls", str(error)
        return "progress", str(error)  # requests preempt one another forever, or are never scheduled
    for rule, other in (("determinism", again), ("promises", skipping)):
        for mine, theirs in zip(once, other, strict=True):
            if mine != theirs:
                what = f"request {mine['request_id']} was {mine['status']} at {mine['end_ns']} ns, then at"
                return rule, f"{what} {theirs['end_ns']} ns" + (" with steps skipped" if other is skipping else "")
    return "", ""


def _ends(policy: str, script: _Script, overlapped: bool, steps: bool) -> list[dict[str, Any]]:
    limits = {"max_model_len": 640, "block_size": 16, **script.limits}
    fleet = FleetConfig()
    if script.patience_s is not None:
        fleet = FleetConfig(admission=AdmissionConfig(patience=Patience(mean_s=script.patience_s, until="finish")))
    deployment = Deployment(
        policy=policy, scheduler=SchedulerConfig(**limits, async_scheduling=overlapped), fleet=fleet
    )
    return _run(deployment, _COST, script.requests, steps)


def _run(deployment: Deployment, cost: TokenCost, offered: list[WorkloadRequest], steps: bool) -> list[dict[str, Any]]:
    sink, shares = TableSink(), shares_prefixes(offered)
    Cluster(deployment, cost, sink, shares_prefixes=shares, steps=steps).run(Workload(offered, shares_prefixes=shares))
    return sink.requests.sort_by("request_id").to_pylist()


def _scripts() -> Iterator[_Script]:
    roomy = {"num_blocks": 400, "max_num_seqs": 16, "max_num_batched_tokens": 256}
    plain = requests(0, 40, every_ms=12, prompt=(20, 200), output=(1, 60))
    yield _Script("tight KV", plain, {**roomy, "num_blocks": 60, "scheduler_reserve_full_isl": False})
    yield _Script("prefix reuse", list(talks(requests(1, 40, 15, (20, 80), (5, 40)))), {**roomy, "num_blocks": 90})
    yield _Script("bursts", [replace(r, arrival_ns=r.id // 20 * 400 * MS) for r in plain], roomy)
    yield _Script("priorities", plain, {**roomy, "max_num_seqs": 4, "policy": "priority"})
    yield _Script("aborts", plain, {**roomy, "max_num_seqs": 6}, patience_s=0.15)
    long = requests(2, 12, every_ms=20, prompt=(300, 560), output=(1, 60))
    yield _Script("long prompts", long, {**roomy, "max_num_batched_tokens": 64, "long_prefill_token_threshold": 48})


def _starved(policy: str) -> str | None:
    """Return text about a request that nearly all later requests pass in a growing queue; None if there is none."""
    short = WorkloadRequest(0, 0, (("", 40),), 8, tenant="a", slo_class="chat")
    long = WorkloadRequest(0, 0, (("", 400),), 60, priority=1, tenant="b", slo_class="batch")
    offered = [replace(long if id % 25 == 5 else short, id=id, arrival_ns=id * 300 * MS) for id in range(150)]
    limits = SchedulerConfig(max_num_seqs=2, max_model_len=640, num_blocks=400, max_num_batched_tokens=512)
    rows = _run(Deployment(policy=policy, scheduler=limits), _SLOW, offered, steps=False)
    begun = [row["scheduled_ns"] for row in rows]
    for id in range(100):
        if begun[id] is None:  # rejected
            continue
        later = [other for other in begun[id + 1 :] if other is not None]
        passed = sum(other < begun[id] for other in later)
        if passed > 0.9 * len(later):
            return f"{passed} of the {len(later)} requests that came after request {id} were run before it"
    return None


def _growing(policy: str) -> str | None:
    """Return text about the growth of a steady decode step's work with the batch; None if it does not grow."""
    small, large = (_calls_of_steady_steps(policy, batch) for batch in (8, 128))
    return None if large <= 1.5 * small else f"{small // 16} calls at a batch of 8, {large // 16} at 128"


def _calls_of_steady_steps(policy: str, batch: int) -> int:
    """Return the number of Python calls in 16 steps (one KV block) in which `batch` requests decode."""
    config = SchedulerConfig(max_num_seqs=batch, max_num_batched_tokens=8 * batch, num_blocks=40 * batch + 1)
    scheduler = contract_with(policy, find_policy(policy)(config, shares_prefixes=False), config)
    counted = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    def run(steps: int) -> None:
        for _ in range(steps):
            if not (plan := scheduler.schedule()).tokens:  # the policy has rejected all requests
                return
            scheduler.commit(plan)

    before = sys.getprofile()
    for id in range(batch):
        scheduler.add(WorkloadRequest(id, 0, (("", 8),), 300))
    run(batch + 4)  # after these steps every request decodes, even if few are admitted per step
    sys.setprofile(count)
    try:
        run(16)
    finally:
        sys.setprofile(before)
    return counted
