"""Rung 1: do engine and simulator decide the same?

The engine's measured step times are fed to the simulator; every decision of the recorded run must come out again: each
step's requests with their tokens, every preemption, every prefix hit. Times are not compared, they are given, and so is
which drafts there were and what was accepted: that follows from tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from calibration.acceptance import DRAFT_COLUMNS, RecordedAcceptance
from serving.deployments.config import Deployment, parse
from serving.errors import UserError
from serving.policies.drafts import judge_drafts
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


class GivenTimes:
    """The cost model of a replay: every plan is made, and every step has ended, when the recorded one had.

    plans_ns   when each step was planned
    in_flight  steps under way at that time: 0, or 1 in the overlapped loop
    end_ns     when the last step ended

    A plan is made as soon as an earlier step ends, so those ends follow from the plans: with none in flight, the step
    before has ended; with one, the step before that. Two ends that one plan waited for are a nanosecond apart.
    """

    def __init__(self, plans_ns: list[int], in_flight: list[int], end_ns: int) -> None:
        count = len(plans_ns)
        ends: list[int | None] = [None] * count
        for number, (planned, lag) in enumerate(zip(plans_ns, in_flight, strict=True)):
            last = number - 1 - lag
            if last >= 0 and ends[last] is None:
                ends[last] = planned
                if last and ends[last - 1] is None:
                    ends[last - 1] = planned - 1
        for number in range(count):
            if ends[number] is None:
                ends[number] = max(end_ns, plans_ns[-1] + 1) + number
        self._cpu_ns = [0] * count
        self._step_ns = [0] * count
        free = 0  # when the device is
        for number, end in enumerate(ends):
            assert end is not None
            start = max(plans_ns[number], free)
            if number + 1 < count and in_flight[number] == 0 and in_flight[number + 1] == 1:
                self._cpu_ns[number] = plans_ns[number + 1] - plans_ns[number]  # the next is planned at once
                start = max(plans_ns[number + 1], free)
            self._step_ns[number] = end - start
            free = end

    def cpu_ns(self, plan: StepPlan) -> int:
        return self._cpu_ns[plan.seq] if plan.seq < len(self._cpu_ns) else 0

    def step_ns(self, plan: StepPlan) -> int:
        return self._step_ns[plan.seq] if plan.seq < len(self._step_ns) else 1_000_000

    def decode_run_ns(self, rows: int, context: int, squares: int, steps: int) -> Iterable[int]:
        raise AssertionError("a replay looks at every step, so nothing is leapt over")


def replay_decisions(recording: Recording) -> DecisionReplay:
    """Replay one recorded real run. Raises UserError if it lacks the steps' rows."""
    deployment = recorded_deployment(recording)
    drafted = DRAFT_COLUMNS if deployment.scheduler.speculative is not None else ()
    real_steps = recording.table("steps", ["plan_ns", "end_ns", "in_flight", *_DECISIONS, *drafted]).to_pylist()
    if not real_steps or any(row["row_ids"] is None for row in real_steps):
        raise UserError("recording", recording.run["run_id"], "holds no step rows; record it with bench")
    plans = [row["plan_ns"] for row in real_steps]
    times = GivenTimes(plans, [row["in_flight"] or 0 for row in real_steps], real_steps[-1]["end_ns"])
    sink = TableSink()
    offered, seen_ns = _as_seen(recording, np.array(plans))
    cluster = Cluster(deployment, times, sink, shares_prefixes=offered.shares_prefixes, tokens=True)
    if drafted and recording.run["clock"] == "wall":
        judge_drafts(cluster.replicas[0].scheduler, RecordedAcceptance(real_steps))
    cluster.run(offered, seen_ns)
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


def _as_seen(recording: Recording, plans: Any) -> tuple[Workload, dict[int, int]]:
    """The workload in the order in which the engine's scheduler saw it, and when it did: at a planning time."""
    workload = recording.workload()
    table = recording.table("requests", ["request_id", "queued_ns", "arrival_ns"])
    queued = dict(zip(table["request_id"].to_pylist(), table["queued_ns"].to_pylist(), strict=True))
    came = dict(zip(table["request_id"].to_pylist(), table["arrival_ns"].to_pylist(), strict=True))
    seen = [  # an interrupted run lacks some
        replace(request, arrival_ns=came[request.id]) for request in workload.requests if request.id in queued
    ]
    seen.sort(key=lambda request: queued[request.id])
    steps = np.minimum(np.searchsorted(plans, [queued[request.id] for request in seen]), len(plans) - 1)
    offered_ns = {request.id: int(plans[step]) for request, step in zip(seen, steps, strict=True)}
    return Workload(seen, workload.name, shares_prefixes=workload.shares_prefixes), offered_ns


def _compare_steps(ours: list[Any], real: list[Any]) -> tuple[int, str | None]:
    for number, (mine, theirs) in enumerate(zip(ours, real, strict=False)):
        for name in _DECISIONS:
            if mine[name] != theirs[name]:
                return number, f"step {number}, {name}: simulated {mine[name]}, real {theirs[name]}"
    if len(ours) < len(real):
        return len(ours), f"step {len(ours)}: simulated nothing, real {real[len(ours)]['row_ids']}"
    return len(real), None
