"""Rung 1 of the validation ladder: a check that engine and simulator make the same decisions.

The simulator gets the engine's measured step times, and must make every decision of the recorded run again: the
requests of each step with their numbers of tokens, every preemption and every prefix hit. Times are inputs and are not
compared. Drafts and their acceptance are also inputs, because they depend on tokens. If there are several engines, each
one is replayed with its own requests, and the router's choices are replayed separately.

The replayed router gets the same information as the real one, in the same order: when a request arrives, it knows of
the requests, tokens and ends of requests that the real router knew of.

Transfers between KV tiers end at the recorded times.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tokentwin.calibration.acceptance import DRAFT_COLUMNS, RecordedAcceptance
from tokentwin.serving.adapter_times import FREE
from tokentwin.serving.deployments.config import Deployment, parse
from tokentwin.serving.errors import UserError
from tokentwin.serving.policies.drafts import judge_drafts
from tokentwin.serving.request import Request
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.workload import STOPPED, Workload, with_session_ends
from tokentwin.sim.clock import FLEET, TRANSFER_ENDS, Alarm, VirtualClock
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.kv_tiers import TieredKv
from tokentwin.sim.replica import Replica
from tokentwin.sim.routed_replica import RoutedReplica
from tokentwin.sim.router import ReplicaSet, find_router
from tokentwin.sim.run_log import RunLog, TableSink
from tokentwin.traces.recording import Recording

_UNUSED_NS = 10**9  # delay after the last plan of transfers without a recorded end; no decision depends on them


class RecordedTiers(TieredKv):
    """The KV tiers of one engine, with recorded transfer times.

    `steps` are the rows of its step table. The rows list the transfers that had ended before each plan, even before
    plans that ran nothing.
    """

    def __init__(
        self, clock: VirtualClock, log: RunLog, replica: Replica, deployment: Deployment, steps: list[dict[str, Any]]
    ) -> None:
        super().__init__(clock, log, replica, deployment)
        self._last_ns = steps[-1]["plan_ns"]
        self._came_ns: dict[int, list[int]] = {}  # end times of each request's loads, in order
        plans = [plan for step in steps for plan in (*(step["kv_attempts"] or ()), step)]
        self._released = {id for plan in plans for id in plan["released_ids"] or ()}
        self._keeping: dict[int, Request] = {}
        for plan in plans:
            for id in plan["loaded_ids"] or ():
                self._came_ns.setdefault(id, []).append(plan["plan_ns"])
            if plan["released_ids"]:  # the engine releases after loads, too
                Alarm(clock, plan["plan_ns"], FLEET, partial(self._release, plan["released_ids"]))

    def _loads_until(self, request: Request, ends_ns: int) -> None:
        came_ns = self._came_ns.get(request.id) or [self._last_ns + _UNUSED_NS]
        at_ns = max(came_ns.pop(0), self._clock.now_ns)
        Alarm(self._clock, at_ns, TRANSFER_ENDS, lambda _: self._replica.loaded(request))

    def _keeps_until(self, request: Request, written_ns: int) -> bool:
        if request.id not in self._released:
            return False
        self._keeping[request.id] = request
        return True

    def _release(self, ids: list[int], alarm: Alarm) -> None:
        for id in ids:
            if (request := self._keeping.pop(id, None)) is not None:
                self._replica.release(request)


_GOT, _LEFT, _SENT = range(3)  # order of messages with the same time
_Event = tuple[int, int, int, dict[str, Any]]  # time, kind, request id, and the request's row


@dataclass(frozen=True)
class RouteReplay:
    """Numbers of all and of identically routed requests; `first_difference` describes the first difference."""

    routes: int
    identical: int
    first_difference: str | None


def replay_routes(recording: Recording, deployment: Deployment) -> RouteReplay:
    """Repeat the routing of every request; raise UserError if the router's information was not recorded."""
    fleet, run = deployment.fleet, recording.run
    events = _events(recording)
    if fleet is None or not events:
        remedy = "does not hold what its router knew; record it with bench --replicas"
        raise UserError("recording", run["run_id"], remedy)
    router = find_router(fleet.router.name, **fleet.router.settings)
    kv_tokens = run["num_blocks"] * run["block_size"]
    replicas, ready = [RoutedReplica(number, kv_tokens) for number in range(run["replicas"])], ReplicaSet()
    for replica in replicas:
        ready.join(replica.as_replica)
    requests = {request.id: request for request in recording.workload().requests}
    routes = identical = 0
    difference = None
    for _, what, id, row in sorted(events, key=lambda event: event[:3]):
        replica = replicas[row["replica"]]
        if what == _GOT:
            replica.got(id, 1)
        elif what == _LEFT:
            replica.loses(id)
        else:
            request = replace(requests[id], arrival_ns=row["arrival_ns"])
            chosen = cast(RoutedReplica, router.choose(request, ready))
            replica.takes(
                id, request.prompt_len, request.output_limit
            )  # the request goes where it went in the recording
            routes += 1
            identical += chosen is replica
            if chosen is not replica and difference is None:
                difference = f"request {id}: simulated to replica {chosen.index}, real to replica {replica.index}"
    return RouteReplay(routes, identical, difference)


def _events(recording: Recording) -> list[_Event]:
    """Return all events of which the router was informed; empty if they were not recorded."""
    steps = recording.table("steps", ["replica", "end_ns", "heard_ns"]).to_pylist()
    heard_ns = {(row["replica"], row["end_ns"]): row["heard_ns"] for row in steps}
    columns = ["request_id", "replica", "arrival_ns", "send_ns", "heard_ns", "token_times_ns"]
    events: list[_Event] = []
    for row in recording.table("requests", columns).to_pylist():
        id = row["request_id"]
        events.append((row["send_ns"], _SENT, id, row))
        tokens_ns = [heard_ns.get((row["replica"], end_ns)) for end_ns in row["token_times_ns"] or ()]
        if None in (*tokens_ns, row["send_ns"]):
            return []
        events += ((time_ns, _GOT, id, row) for time_ns in tokens_ns if time_ns is not None)
        if row["heard_ns"] is not None:
            events.append((row["heard_ns"], _LEFT, id, row))
    return events


_DECISIONS = ("row_ids", "row_tokens", "preempted_ids")
_NEVER_NS = 10**15
_TIERED = ("loaded_ids", "released_ids", "kv_attempts", "kv_attempts_in_flight")


@dataclass(frozen=True)
class DecisionReplay:
    """Numbers of steps, requests and routes, and of those that were identical in the replay.

    Attributes:
        routes: number of requests that a router sent to one of several engines
        first_difference: description of the first difference, or None
    """

    steps: int
    identical: int
    requests: int
    identical_requests: int
    first_difference: str | None
    routes: int = 0
    identical_routes: int = 0

    @property
    def exact(self) -> bool:
        return self.first_difference is None


class GivenTimes:
    """The cost model of a replay: every plan is made and every step ends at the recorded time.

    Attributes:
        plans_ns: time at which each step was planned
        in_flight: number of steps that were running at that time: 0, or 1 in the overlapped loop
        end_ns: end of the last step
        tried: for each step, the plans before it that could run nothing, as (time, number of steps running then)
        left: for each request that its client cancelled, the time and the number of steps that had returned by then

    A plan is made as soon as an earlier step ends, so the ends of steps follow from the plans. If no step is in flight,
    the previous step has just ended. If one is in flight, the step before it has just ended. If a plan waited for two
    ends, they are a nanosecond apart.
    """

    def __init__(
        self,
        plans_ns: list[int],
        in_flight: list[int],
        end_ns: int,
        tried: Sequence[Sequence[tuple[int, int]]] | None = None,
        left: Iterable[tuple[int, int]] = (),
    ) -> None:
        self._plans_ns = plans_ns
        self.adapters = FREE
        count = len(plans_ns)
        made = zip(plans_ns, in_flight, strict=True)
        plans = [[*tries, one] for tries, one in zip(tried or [()] * count, made, strict=True)]
        self._seen = sorted((at_ns, number - lag) for number, its in enumerate(plans) for at_ns, lag in its)
        ends: list[int | None] = [None] * count
        for number, (planned, lag) in ((number, one) for number, its in enumerate(plans) for one in its):
            last = number - 1 - lag
            if last >= 0 and ends[last] is None:
                ends[last] = planned
                if last and ends[last - 1] is None:
                    ends[last - 1] = planned - 1
        for number in range(count):
            if ends[number] is None:
                ends[number] = max(end_ns, plans_ns[-1] + 1) + number
        self._ends_ns = cast(list[int], ends)
        self._cpu_ns = [0] * count
        self._step_ns = [0] * count
        left_ns = {self.left_ns(*one) for one in left}
        free = 0  # time from which the device is free
        for number, end in enumerate(ends):
            assert end is not None
            start = max(plans_ns[number], free)
            if number + 1 < count and in_flight[number] == 0 and plans[number + 1][0][1] == 1:
                next_ns, _ = plans[number + 1][0]
                self._cpu_ns[number] = next_ns - plans_ns[number]  # the next step is planned at once
                start = max(next_ns, free)
            # the engine plans only to remove a cancelled request, and runs nothing
            elif plans_ns[number] + 1 in left_ns:
                self._cpu_ns[number] = 1
                start = max(plans_ns[number] + 1, free)
            self._step_ns[number] = end - start
            free = end

    def next_plan_ns(self, now_ns: int) -> int:
        """Return the time of the first plan from `now_ns` on; if there is none, a time long after all plans."""
        at = bisect_left(self._plans_ns, now_ns)
        return self._plans_ns[at] if at < len(self._plans_ns) else now_ns + _NEVER_NS

    def left_ns(self, time_ns: int, returned: int) -> int:
        """Return when the replay removes a request that its client cancelled at `time_ns`, after `returned` steps.

        The time is before the next plan, and after the last plan or the end of the previous step.
        """
        at = bisect_left(self._seen, (time_ns, 0))
        if at < len(self._seen) and self._seen[at][1] <= returned:
            return self._seen[at][0]
        planned_ns, before = self._seen[at - 1] if at else (time_ns - 1, 0)
        if before < returned <= len(self._ends_ns):
            return self._ends_ns[returned - 1]
        return planned_ns + 1

    def cpu_ns(self, plan: StepPlan) -> int:
        return self._cpu_ns[plan.seq] if plan.seq < len(self._cpu_ns) else 0

    def step_ns(self, plan: StepPlan) -> int:
        return self._step_ns[plan.seq] if plan.seq < len(self._step_ns) else 1_000_000

    def decode_run_ns(self, rows: int, context: int, squares: int, steps: int) -> Iterable[int]:
        raise AssertionError("a replay looks at every step, so nothing is leapt over")


def replay_decisions(recording: Recording) -> DecisionReplay:
    """Replay one recorded real run; raise UserError if the rows of its steps were not recorded."""
    deployment = recorded_deployment(recording)
    drafted = DRAFT_COLUMNS if deployment.scheduler.speculative is not None else ()
    tiered = _TIERED if deployment.kv_tiers is not None else ()
    columns = ["replica", "plan_ns", "end_ns", "in_flight", *_DECISIONS, *drafted, *tiered]
    steps = recording.table("steps", columns).to_pylist()
    if not steps or any(row["row_ids"] is None for row in steps):
        raise UserError("recording", recording.run["run_id"], "holds no step rows; record it with bench")
    if recording.run["replicas"] == 1:
        return _replay_engine(recording, deployment, steps)
    alone = deployment.model_copy(update={"fleet": None})
    numbers = sorted({row["replica"] for row in steps})
    replays = [
        _replay_engine(recording, alone, [row for row in steps if row["replica"] == number], number)
        for number in numbers
    ]
    routes = replay_routes(recording, deployment)
    whole = worst(replays)
    return replace(
        whole,
        routes=routes.routes,
        identical_routes=routes.identical,
        first_difference=whole.first_difference or routes.first_difference,
    )


def worst(replays: Sequence[DecisionReplay]) -> DecisionReplay:
    """Combine the replays into one: sums of their counts, and the first difference."""
    return DecisionReplay(
        steps=sum(r.steps for r in replays),
        identical=sum(r.identical for r in replays),
        requests=sum(r.requests for r in replays),
        identical_requests=sum(r.identical_requests for r in replays),
        first_difference=next((r.first_difference for r in replays if r.first_difference), None),
        routes=sum(r.routes for r in replays),
        identical_routes=sum(r.identical_routes for r in replays),
    )


def _replay_engine(
    recording: Recording, deployment: Deployment, real_steps: list[dict[str, Any]], replica: int | None = None
) -> DecisionReplay:
    """Replay one engine: the only one, or the one with the number `replica`."""
    plans = [row["plan_ns"] for row in real_steps]
    tried = [_attempts(row) for row in real_steps]
    sink = TableSink()
    columns = ["request_id", "status", "prefix_hit_tokens", "preemptions", "output_tokens"]
    if deployment.kv_tiers is not None:
        columns += ["tier_hit_tokens", "swapped_in_tokens"]
    had = recording.table(
        "requests",
        [*columns, "replica", "queued_ns", "arrival_ns", "end_ns", "reason", "grammar_compile_ns", "steps_before_end"],
    )
    if replica is not None:
        had = had.filter(pc.equal(had["replica"], replica))
    left = _left(had, real_steps)
    in_flight = [row["in_flight"] or 0 for row in real_steps]
    times = GivenTimes(plans, in_flight, real_steps[-1]["end_ns"], tried, left.values())
    planned_ns = sorted([*plans, *(at_ns for at_ns, _ in chain.from_iterable(tried))])
    left_ns = {id: times.left_ns(*one) for id, one in left.items()}
    workload, by_session = recording.workload(), deployment.scheduler.kv_eviction == "session"
    if by_session:
        workload = with_session_ends(workload)
    offered, seen_ns = _as_seen(workload, had, np.array(planned_ns), left_ns, by_session)
    on_wall = recording.run["clock"] == "wall"
    if deployment.multimodal is not None:  # the given times include encoding
        free = deployment.multimodal.model_copy(update={"encoder_us_per_token": 0.0})
        deployment = deployment.model_copy(update={"multimodal": free})
    untiered = deployment.model_copy(update={"kv_tiers": None}) if on_wall else deployment
    cluster = Cluster(untiered, times, sink, shares_prefixes=offered.shares_prefixes, tokens=True)
    if deployment.kv_tiers is not None and on_wall:
        cluster.connect_tiers(lambda clock, log, own: RecordedTiers(clock, log, own, deployment, real_steps))
    if deployment.scheduler.speculative is not None and on_wall:
        judge_drafts(cluster.replicas[0].scheduler, RecordedAcceptance(real_steps))
    for engine in cluster.replicas:
        engine.held_until = times.next_plan_ns
    cluster.run(offered, seen_ns)
    ours = sink.steps.select(_DECISIONS).to_pylist()
    identical, difference = _compare_steps(ours, real_steps)
    real = {r["request_id"]: r for r in had.select(columns).to_pylist() if r["status"] != "unfinished"}
    simulated = {r["request_id"]: r for r in sink.requests.select(columns).to_pylist()}
    same = sum(simulated.get(id) == row for id, row in real.items())
    if same < len(real) and difference is None:
        id = next(id for id, row in real.items() if simulated.get(id) != row)
        difference = f"request {id}: simulated {simulated.get(id)}, real {real[id]}"
    if difference is not None and replica is not None:
        difference = f"replica {replica}, {difference}"
    return DecisionReplay(len(real_steps), identical, len(real), same, difference)


def _attempts(step: dict[str, Any]) -> list[tuple[int, int]]:
    """Return the plans before a recorded step that ran nothing, as (time, number of steps running then)."""
    times_ns = [one["plan_ns"] for one in step.get("kv_attempts") or ()]
    return list(zip(times_ns, step.get("kv_attempts_in_flight") or [0] * len(times_ns), strict=True))


def recorded_deployment(recording: Recording) -> Deployment:
    """Return the deployment of a recording."""
    return parse(Deployment, json.loads(recording.run["deployment"]), where=f"{recording.run['run_id']}.deployment")


def _left(had: pa.Table, steps: Sequence[dict[str, Any]]) -> dict[int, tuple[int, int]]:
    """Return by request id when clients cancelled requests, and the number of steps that had returned by then."""
    ends_ns = sorted(step["end_ns"] for step in steps)
    left = {}
    for row in had.to_pylist():
        if row["status"] == "cancelled" or row["reason"] == STOPPED:
            returned = row["steps_before_end"]
            left[row["request_id"]] = (
                row["end_ns"],
                bisect_right(ends_ns, row["end_ns"]) if returned is None else returned,
            )
    return left


def _as_seen(
    workload: Workload, had: pa.Table, plans: Any, left_ns: Mapping[int, int], by_session: bool
) -> tuple[Workload, dict[int, int]]:
    """Return an engine's requests `had` in the order in which its scheduler saw them, and when it saw them.

    The scheduler sees new requests and compiled grammars at planning times, and cancelled requests at `left_ns`. It
    never saw requests that arrived after the last plan and did not end. One engine may not have had every turn of a
    conversation, so no turn waits for another. Unless `by_session`, the requests have no session.
    """
    rows = {row["request_id"]: row for row in had.to_pylist()}
    for row in rows.values():
        if row["queued_ns"] is None:  # the request had not ended when its process was killed
            row["queued_ns"] = row["arrival_ns"]

    def planned_ns(time_ns: int) -> int:
        step = np.searchsorted(plans, time_ns)
        return int(plans[step]) if step < len(plans) else time_ns

    seen = []
    for request in workload.requests:
        row = rows.get(request.id)  # an interrupted run lacks some requests
        if row is None or (row["status"] == "unfinished" and row["queued_ns"] > plans[-1]):
            continue
        gone_ns = left_ns.get(request.id)
        cancel_ns, stop_ns = (None, gone_ns) if row["reason"] == STOPPED else (gone_ns, None)
        compile_ns = planned_ns(row["queued_ns"] + (row["grammar_compile_ns"] or 0)) - planned_ns(row["queued_ns"])
        alone = replace(request, think_ns=None, grammar_compile_ns=compile_ns)
        if not by_session:
            alone = replace(alone, session="", turn=0)
        seen.append(replace(alone, arrival_ns=row["arrival_ns"], cancel_ns=cancel_ns, stop_ns=stop_ns))
    seen.sort(key=lambda request: int(rows[request.id]["queued_ns"]))
    offered_ns = {request.id: planned_ns(rows[request.id]["queued_ns"]) for request in seen}
    return Workload(seen, workload.name, shares_prefixes=workload.shares_prefixes), offered_ns


def _compare_steps(ours: list[Any], real: list[Any]) -> tuple[int, str | None]:
    for number, (mine, theirs) in enumerate(zip(ours, real, strict=False)):
        for name in _DECISIONS:
            if mine[name] != theirs[name]:
                return number, f"step {number}, {name}: simulated {mine[name]}, real {theirs[name]}"
    if len(ours) < len(real):
        return len(ours), f"step {len(ours)}: simulated nothing, real {real[len(ours)]['row_ids']}"
    return len(real), None
