"""A log that turns the events of a simulation into rows of a recording.

Rows go to a sink in column blocks, so memory is bounded by the requests and steps in flight: a `RecordingWriter`
streams them to disk, a `TableSink` keeps them as Arrow tables. The time of each output token is the end of a step.
These ends are kept for each replica, and are looked up when a request's row is written.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.deployments.kv_layout import most_held
from tokentwin.serving.request import Request, Status
from tokentwin.serving.scheduler import Scheduler
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.workload import WorkloadRequest
from tokentwin.sim.leap import Leap
from tokentwin.sim.step_log import StepLog
from tokentwin.traces.schema import arrow_schema


class Sampled(NamedTuple):
    """A request that finished: its last replica, the tokens that its user got on an earlier one, and their time."""

    request: Request
    replica: int
    sampled_before: int
    first_token_ns: int | None


class TokenTimes:
    """The ends of all steps, eight bytes each.

    Attributes:
        ends_ns: by replica
    """

    def __init__(self) -> None:
        self.ends_ns: dict[int, array[int]] = {}

    def lists(self, samples: Iterable[Sampled | None]) -> pa.ListArray:
        """Return a list of token times in nanoseconds for each request; null for None."""
        ends_ns = {replica: np.frombuffer(ends, np.int64) for replica, ends in self.ends_ns.items()}
        parts, offsets, nothing = [np.zeros(0, np.int64)], [0], []
        for sample in samples:
            nothing.append(sample is None)
            tokens = 0
            if sample is not None:
                left = sample.request.outputs
                if sample.sampled_before:
                    parts.append(np.full(min(sample.sampled_before, left), sample.first_token_ns, np.int64))
                    left -= len(parts[-1])
                for first, count in sample.request.sampled_in:
                    if left:
                        parts.append(ends_ns[sample.replica][first : first + min(count, left)])
                        left -= len(parts[-1])
                tokens = sample.request.outputs - left
            offsets.append(offsets[-1] + tokens)
        mask = pa.array(nothing) if any(nothing) else None
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(np.concatenate(parts)), mask=mask)


BLOCK = 16_384  # default number of rows handed to the sink at once
# number of rows that are turned into columns together, so few that they are still in the processor's cache
_AT_ONCE = 256
# a request with token times counts as this number of rows, so that fewer are kept: new memory takes time
_TOKENS_WIDE = 8
_NOWHERE = -1  # replica number of a request that is on no replica
_FINISHED = Status.FINISHED.value

# Arguments: id of the request, True if it finished, its number of output tokens, and in nanoseconds its arrival, its
# first token (None if there is none) and its end.
Observer = Callable[[int, bool, int, int, int | None, int], None]

# Arguments: number of a replica, a step of the replica, the requests that the step has sampled for, and the end of the
# step in nanoseconds. It is also called when a decode replica plans a request whose KV has come, with an empty step.
TokenObserver = Callable[[int, StepPlan, list[Request], int], None]


class RunSink(Protocol):
    """A sink that takes blocks of columns of the datasets `requests` and `steps`."""

    def add_requests(self, columns: Mapping[str, Sequence[Any]]) -> None: ...
    def add_steps(self, columns: Mapping[str, Sequence[Any]]) -> None: ...


class TableSink:
    """A sink that keeps everything in memory, as Arrow tables with the schema of a recording."""

    def __init__(self) -> None:
        self._blocks: dict[str, list[pa.Table]] = {"requests": [], "steps": []}

    def add_requests(self, columns: Mapping[str, Sequence[Any]]) -> None:
        self._add("requests", columns)

    def add_steps(self, columns: Mapping[str, Sequence[Any]]) -> None:
        self._add("steps", columns)

    def _add(self, dataset: str, columns: Mapping[str, Sequence[Any]]) -> None:
        rows = len(next(iter(columns.values())))
        schema = arrow_schema(dataset)
        arrays = [pa.array(columns[f.name], f.type) if f.name in columns else pa.nulls(rows, f.type) for f in schema]
        self._blocks[dataset].append(pa.Table.from_arrays(arrays, schema=schema))

    @property
    def requests(self) -> pa.Table:
        return self._table("requests")

    @property
    def steps(self) -> pa.Table:
        return self._table("steps")

    def _table(self, dataset: str) -> pa.Table:
        blocks = self._blocks[dataset]
        return pa.concat_tables(blocks) if blocks else arrow_schema(dataset).empty_table()


@dataclass(slots=True)
class _Life:
    """The times of one attempt at a request; None if the event did not happen."""

    replica: int
    arrival_ns: int
    queued_ns: int | None
    demand: int  # number of KV blocks that the request needs while it waits
    attempts: int
    tier_hits: list[tuple[str, int]] | None
    swapped_in_tokens: int | None
    waits: bool = False
    scheduled_ns: int | None = None
    first_token_ns: int | None = None
    preempted_at_ns: int | None = None
    preempted_ns: int = 0
    prefilled: Request | None = None  # the part of the request that ran on the prefill replica `prefill_replica`
    prefill_replica: int | None = None
    sampled_before: int = 0  # number of tokens that `prefilled` sampled and the user got
    transfer_since_ns: int = 0
    transfer_ns: int | None = None
    awaits_kv: bool = False  # True if users get the first token only when the decode replica takes the request


_SERVED_ONLY = (
    "received_ns", "first_text_ns", "first_sent_ns", "last_text_ns", "last_sent_ns", "client_id", "client_ns",
    "heard_ns", "steps_before_end",
)  # fmt: skip
# columns in the order of the values of a row, which is a tuple because it is made and read faster than an object
_ROW = (
    "request_id", "replica", "tenant", "slo_class", "priority", "status", "reason", "prompt_tokens", "output_tokens",
    "arrival_ns", "send_ns", "queued_ns", "scheduled_ns", "first_token_ns", "finish_ns", "prefix_hit_tokens",
    "preemptions", "preempted_ns", "recomputed_tokens", "token_times_ns", "attempts", "end_ns", "session", "turn",
    "drafts", "draft_tokens", "accepted_tokens", "prefill_replica", "transfer_ns", "tier_hit_tokens",
    "swapped_in_tokens", "grammar_compile_ns",
)  # fmt: skip


class RunLog:
    """The log of one simulated run.

    Attributes:
        steps: True if each step that ended gets a row
        tokens: True if the time of each output token is written and, with `steps`, the requests of each step
        queued: requests that wait for a place in a step, on all replicas
        block: number of rows handed to the sink at once
        observers: functions called when a request ends
        counted_from_ns: requests that arrive earlier get no row, because the run was still warming up
        counted_from_id: requests with a lower id get no row, for the same reason
        on_tokens: function called when requests get tokens, which needs `steps`; None if there is none
        leaps: True if many decode steps may be simulated at once although steps are recorded (not with `on_tokens`).
            The cost model must then return the same times for a run of steps as for the single steps, whatever calls
            came before
    """

    def __init__(
        self,
        sink: RunSink,
        steps: bool = True,
        tokens: bool = False,
        block: int = BLOCK,
        on_tokens: TokenObserver | None = None,
        leaps: bool = False,
    ) -> None:
        self.leaps = not steps or (leaps and on_tokens is None)
        self.keeps_steps = steps
        self.keeps_tokens = tokens
        self.finished = 0
        self.steps = 0
        self.output_tokens = 0
        self.queued = 0
        self.observers: list[Observer] = []
        self.counted_from_ns = 0
        self.counted_from_id = 0
        self._sink = sink
        self._requests_at_once = max(block // _TOKENS_WIDE, 1) if tokens else block
        self._lives: dict[int, _Life] = {}
        self._token_times = TokenTimes()
        self._waiting_blocks: dict[int, int] = {}
        # by replica, function from a number of known tokens to a number of blocks
        self._demand: dict[int, Callable[[int], int]] = {}
        self._tiered: set[int] = set()
        self.step_log = StepLog(sink.add_steps, block, tokens, self.leaps)
        self._on_tokens = on_tokens
        # by replica, the requests for which each step in flight samples, for `on_tokens`
        self._samples: dict[int, deque[list[Request]]] = {}
        self._request_rows: list[tuple[Any, ...]] = []

    # Replicas

    def started(self, replica: int, settings: SchedulerConfig) -> None:
        self._demand[replica] = partial(most_held, settings)
        self._waiting_blocks[replica] = 0
        self._token_times.ends_ns[replica] = array("q")
        self._samples[replica] = deque()

    def tiered(self, replica: int) -> None:
        """Record that a replica has KV tiers."""
        self._tiered.add(replica)

    def crashed(self, replica: int) -> None:
        """Drop the steps in flight of a replica that has crashed; they never end."""
        self.step_log.crashed(replica)
        self._samples[replica].clear()

    # Steps

    def preempted(self, replica: int, requests: Iterable[Request], now_ns: int) -> None:
        """Queue `requests` again, because a plan has preempted them; the plan may contain nothing else.

        A policy may also preempt and admit requests whose clients have hung up; their rows are written.
        """
        for request in requests:
            if request.ended:
                continue
            life = self._lives[request.id]
            life.preempted_at_ns = now_ns
            life.demand = self._demand[replica](request.known)
            self._queue(life)

    def planned(
        self,
        replica: int,
        scheduler: Scheduler,
        plan: StepPlan,
        plan_ns: int,
        start_ns: int,
        end_ns: int,
        stages_ns: list[int] | None = None,
    ) -> None:
        for request in plan.admitted:
            if request.ended:
                continue
            life = self._lives[request.id]
            self._unqueue(life, start_ns)
            if life.awaits_kv and life.prefilled is not None:
                self._give_first_token(life, request, plan_ns)
            if life.scheduled_ns is None:
                life.scheduled_ns = start_ns
        if self.keeps_tokens:
            self._token_times.ends_ns[replica].append(end_ns)
        if self.keeps_steps:
            blocks = self._waiting_blocks[replica]
            self.step_log.planned(replica, scheduler, plan, plan_ns, start_ns, end_ns, blocks, stages_ns)
            if self._on_tokens is not None:
                self._samples[replica].append([row.request for row in plan.rows() if row.samples])

    def committed(self, replica: int, plan: StepPlan, now_ns: int) -> None:
        """End a step. Only rows outside the decode set can have a first token."""
        self.steps += 1
        for request, _, _, samples, _ in plan.listed:
            # with accepted drafts, the step may have sampled the first token and more
            first = request.outputs == 1 or plan.accepted_tokens
            if samples and first and request.status is not Status.ABORTED:
                life = self._lives.get(request.id)
                if life is not None and life.first_token_ns is None and not life.awaits_kv:
                    life.first_token_ns = now_ns
        if self.keeps_steps:
            self.step_log.committed(replica, now_ns)
            if self._on_tokens is not None:
                sampled = [one for one in self._samples[replica].popleft() if not self.awaits_kv(one)]
                self._on_tokens(replica, plan, sampled, now_ns)

    def leapt(self, replica: int, scheduler: Scheduler, leap: Leap, steps: int) -> None:
        """End the first `steps` steps of `leap` at once; call this just before the scheduler takes these steps."""
        self.steps += steps
        if self.keeps_steps:
            self.step_log.leapt(replica, scheduler, leap, steps, self._waiting_blocks[replica])
        if self.keeps_tokens:
            self._token_times.ends_ns[replica].fromlist(leap.ends_ns(steps))

    # Requests

    def arrived(
        self, replica: int, request: Request, arrival_ns: int, now_ns: int, attempts: int, awaits_kv: bool = False
    ) -> None:
        demand, tiered = self._demand[replica](request.known), replica in self._tiered
        life = _Life(replica, arrival_ns, now_ns, demand, attempts, [] if tiered else None, 0 if tiered else None)
        life.awaits_kv = awaits_kv
        self._lives[request.id] = life
        if request.status is not Status.REJECTED:
            self._queue(life)

    def reserved(self, request: Request) -> None:
        """Record that a request has its blocks on the decode replica where it has arrived, and awaits its prefill."""
        self._has_blocks(self._lives[request.id])

    def prefills(self, replica: int, request: Request) -> None:
        """Queue `request`, which has its blocks on a decode replica, at a prefill replica."""
        life = self._lives[request.id]
        life.replica = replica
        if request.status is not Status.REJECTED:
            life.demand = self._demand[replica](request.known)
            self._waiting_blocks[replica] += life.demand

    def handed_on(self, request: Request, now_ns: int) -> None:
        """Remove from the queue a request that a prefill replica has finished."""
        self._unqueue(self._lives[request.id], now_ns)

    def taken_over(self, replica: int, prefilled: Request, request: Request) -> None:
        """Queue `request` at a decode replica; a prefill replica ran `prefilled`."""
        life = self._lives[request.id]
        life.prefilled, life.prefill_replica, life.replica = prefilled, life.replica, replica
        life.sampled_before = request.outputs
        if not request.outputs:
            life.first_token_ns = None
        life.demand = self._demand[replica](request.known)
        if request.status is not Status.REJECTED:
            self._queue(life)

    def transfer_begins(self, request: Request, now_ns: int) -> None:
        """Record that a request has its blocks on the decode replica, so that the transfer of its KV begins."""
        life = self._lives[request.id]
        self._has_blocks(life)
        life.transfer_since_ns = now_ns

    def transferred(self, request: Request, now_ns: int) -> None:
        """End the transfer of the KV of a request."""
        life = self._lives[request.id]
        life.transfer_ns = now_ns - life.transfer_since_ns

    def loads(self, request: Request, tier: str, tokens: int) -> None:
        """Record that a request, which has its blocks, loads `tokens` tokens from a KV tier."""
        life = self._lives[request.id]
        self._has_blocks(life)
        assert life.tier_hits is not None and life.swapped_in_tokens is not None
        if request.preemptions:
            life.swapped_in_tokens += tokens
        else:
            life.tier_hits.append((tier, tokens))

    def withdrawn(self, request: Request, now_ns: int) -> None:
        """Drop an attempt that has failed."""
        self._unqueue(self._lives.pop(request.id), now_ns)

    def refused(self, arrived: WorkloadRequest, arrival_ns: int, now_ns: int, status: str, reason: str, n: int) -> None:
        """Write the row of a request that left after `n` attempts and is on no replica."""
        nowhere = _Life(_NOWHERE, arrival_ns, None, 0, n, None, None)
        self._add_request(Request(arrived), nowhere, now_ns, status, reason)

    def ended(self, request: Request, now_ns: int, status: str = "", reason: str = "") -> None:
        """Write the row of a request that left its replica: finished or rejected, unless `status` says otherwise."""
        life = self._lives.pop(request.id)
        self._unqueue(life, now_ns)
        self._add_request(request, life, now_ns, status or request.status.value, reason or request.reason)

    def _add_request(self, request: Request, life: _Life, now_ns: int, status: str, reason: str) -> None:
        finished = status == _FINISHED
        outputs = 0 if life.first_token_ns is None else request.outputs
        self.finished += finished
        self.output_tokens += outputs
        if life.arrival_ns >= self.counted_from_ns and request.id >= self.counted_from_id:
            self._add_row(request, life, outputs, now_ns, status, reason)
        for observer in self.observers:
            observer(request.id, finished, outputs, life.arrival_ns, life.first_token_ns, now_ns)

    def _add_row(self, request: Request, life: _Life, outputs: int, now_ns: int, status: str, reason: str) -> None:
        arrived, finished = request.arrived, status == _FINISHED
        hit, preemptions, recomputed = request.first_hit, request.preemptions, max(request.recomputed, 0)
        if (before := life.prefilled) is not None:
            hit = before.first_hit
            preemptions += before.preemptions
            recomputed += max(before.recomputed, 0)
        sampled = None  # from which `TokenTimes` finds the times when the row is written
        if finished and self.keeps_tokens:
            sampled = Sampled(request, life.replica, life.sampled_before, life.first_token_ns)
        self._request_rows.append(
            (
                request.id,
                life.replica if life.replica != _NOWHERE else None,
                arrived.tenant,
                arrived.slo_class,
                request.priority,
                status,
                reason,
                request.prompt_len,
                outputs,
                life.arrival_ns,
                life.arrival_ns,
                life.queued_ns,
                life.scheduled_ns,
                life.first_token_ns,
                now_ns if finished else None,
                hit or 0,
                preemptions,
                life.preempted_ns,
                recomputed,
                sampled,
                life.attempts,
                now_ns,
                arrived.session,
                arrived.turn,
                request.drafts,
                request.draft_tokens,
                request.accepted_tokens,
                life.prefill_replica,
                life.transfer_ns,
                life.tier_hits,
                life.swapped_in_tokens,
                arrived.grammar_compile_ns or None,
            )
        )
        if len(self._request_rows) >= self._requests_at_once:
            self._flush_requests()

    def _give_first_token(self, life: _Life, request: Request, now_ns: int) -> None:
        """Record that users get the first token of `request`, which a prefill replica has sampled."""
        life.awaits_kv, life.first_token_ns = False, now_ns
        if self._on_tokens is not None:
            self._on_tokens(life.replica, StepPlan.from_amounts(), [request], now_ns)

    def awaits_kv(self, request: Request) -> bool:
        """Return whether a prefill replica computes the first token of `request`, which users have not got yet."""
        life = self._lives.get(request.id)
        return life is not None and life.awaits_kv

    def _queue(self, life: _Life) -> None:
        life.waits = True
        self.queued += 1
        self._waiting_blocks[life.replica] += life.demand

    def _has_blocks(self, life: _Life) -> None:
        """Stop counting the blocks that a request needs, because it has them, although it still waits."""
        self._waiting_blocks[life.replica] -= life.demand
        life.demand = 0

    def _unqueue(self, life: _Life, now_ns: int) -> None:
        if life.waits:
            life.waits = False
            self.queued -= 1
            self._waiting_blocks[life.replica] -= life.demand
            if life.preempted_at_ns is not None:
                life.preempted_ns += now_ns - life.preempted_at_ns
                life.preempted_at_ns = None

    def close(self) -> None:
        self._flush_requests()
        self.step_log.close()

    def _flush_requests(self) -> None:
        rows = self._request_rows
        if rows:
            columns: dict[str, Any] = {name: [] for name in _ROW}
            for first in range(0, len(rows), _AT_ONCE):
                part = zip(*rows[first : first + _AT_ONCE], strict=True)
                for column, values in zip(columns.values(), part, strict=True):
                    column.extend(values)
            if self.keeps_tokens:
                columns["token_times_ns"] = self._token_times.lists(columns["token_times_ns"])
            self._sink.add_requests(columns)
            rows.clear()
