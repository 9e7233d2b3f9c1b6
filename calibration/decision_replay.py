"""Rung 1: do engine and simulator decide the same?

The engine's measured step times are fed to the simulator; every decision of the recorded run must come out again: each
step's requests with their tokens, every preemption, every prefix hit. Times are not compared, they are given.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from serving.config import Deployment, parse
from serving.errors import UserError
from serving.step_plan import StepPlan
from serving.workload import Workload
from sim.cluster import Cluster
from sim.run_log import TableSink
from traces.recording import Recording

_DECISIONS = ("row_ids", "row_tokens", "preempted_ids")


@dataclass(frozen=True)
class DecisionReplay:
    """How many steps and requests came out identical; `first_difference` is None or says which did not."""

    steps: int
    identical: int
    requests: int
    identical_requests: int
    first_difference: str | None

    @property
    def exact(self) -> bool:
        return self.first_difference is None


class _GivenTimes:
    """The cost model of a replay: step k takes from its planning to the planning of step k + 1."""

    def __init__(self, durations_ns: list[int]) -> None:
        self._durations_ns = durations_ns

    def cpu_ns(self, plan: StepPlan) -> int:
        return 0

    def step_ns(self, plan: StepPlan) -> int:
        return self._durations_ns[plan.seq] if plan.seq < len(self._durations_ns) else 1_000_000

    def decode_run_ns(self, rows: int, context: int, steps: int) -> Iterable[int]:
        raise AssertionError("a replay looks at every step, so nothing is leapt over")


def replay_decisions(recording: Recording) -> DecisionReplay:
    """Replay one recorded real run. Raises UserError if it lacks the steps' rows."""
    deployment = recorded_deployment(recording)
    real_steps = recording.table("steps", ["plan_ns", "end_ns", *_DECISIONS]).to_pylist()
    if not real_steps or any(row["row_ids"] is None for row in real_steps):
        raise UserError("recording", recording.run["run_id"], "holds no step rows; record it with bench")
    plans = [row["plan_ns"] for row in real_steps]
    durations = [b - a for a, b in pairwise(plans)]
    durations.append(real_steps[-1]["end_ns"] - plans[-1])
    sink = TableSink()
    offered = _as_seen(recording, np.array(plans))
    cluster = Cluster(deployment, _GivenTimes(durations), sink, shares_prefixes=offered.shares_prefixes, tokens=True)
    cluster.run(offered)
    ours = sink.steps.select(_DECISIONS).to_pylist()
    identical, difference = _compare_steps(ours, real_steps)
    columns = ["request_id", "status", "prefix_hit_tokens", "preemptions", "output_tokens"]
    real = {r["request_id"]: r for r in recording.table("requests", columns).to_pylist() if r["status"] != "unfinished"}
    simulated = {r["request_id"]: r for r in sink.requests.select(columns).to_pylist()}
    same = sum(simulated.get(id) == row for id, row in real.items())
    if same < len(real) and difference is None:
        id = next(id for id, row in real.items() if simulated.get(id) != row)
        difference = f"request {id}: simulated {simulated.get(id)}, real {real[id]}"
    return DecisionReplay(len(real_steps), identical, len(real), same, difference)


def recorded_deployment(recording: Recording) -> Deployment:
    """The deployment that a recording was made with."""
    return parse(Deployment, json.loads(recording.run["deployment"]), where=f"{recording.run['run_id']}.deployment")


def _as_seen(recording: Recording, plans: Any) -> Workload:
    """The workload with each request arriving when the engine's scheduler first saw it: at a planning time."""
    workload = recording.workload()
    table = recording.table("requests", ["request_id", "queued_ns"])
    queued = dict(zip(table["request_id"].to_pylist(), table["queued_ns"].to_pylist(), strict=True))
    seen = []
    for request in workload.requests:
        if request.id in queued:  # an interrupted run never offered the others
            step = int(np.searchsorted(plans, queued[request.id]))
            at_ns = int(plans[min(step, len(plans) - 1)])
            seen.append((queued[request.id], replace(request, arrival_ns=at_ns)))
    seen.sort(key=lambda pair: pair[0])
    return Workload([request for _, request in seen], workload.name, shares_prefixes=workload.shares_prefixes)


def _compare_steps(ours: list[Any], real: list[Any]) -> tuple[int, str | None]:
    for number, (mine, theirs) in enumerate(zip(ours, real, strict=False)):
        for name in _DECISIONS:
            if mine[name] != theirs[name]:
                return number, f"step {number}, {name}: simulated {mine[name]}, real {theirs[name]}"
    if len(ours) < len(real):
        return len(ours), f"step {len(ours)}: simulated nothing, real {real[len(ours)]['row_ids']}"
    return len(real), None
