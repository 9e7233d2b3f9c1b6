"""A recorder that turns the events on a real engine into rows of a recording."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tokentwin.realengine.step import Step, TierEvents
from tokentwin.serving.request import Request
from tokentwin.serving.step_plan import AGGREGATES, aggregates_of
from tokentwin.serving.workload import STOPPED

# fields of a step that are columns of the same name
_AS_THEY_ARE = ("prepare_ns", "launch_ns", "host_ns", "graph", "thread_ns", "speed", "draft_ns")


class RowSink(Protocol):
    """A receiver of rows for the datasets `requests` and `steps`; a column that is not passed is null."""

    def add_request(self, **columns: Any) -> None: ...
    def add_step(self, **columns: Any) -> None: ...


@dataclass(slots=True)
class _Life:
    """The times of one request's events, in ns from the start of the run."""

    request: Request
    arrival_ns: int
    send_ns: int
    queued_ns: int
    compiled_ns: int | None = None
    scheduled_ns: int | None = None
    preempted_at_ns: int | None = None
    resumes_from_ns: int | None = None  # time of a preemption whose readmission is planned, but has not run yet
    preempted_ns: int = 0
    token_times_ns: list[int] = field(default_factory=list)
    tier_hits: int = 0
    swapped_in: int = 0


class RunRecorder:
    """A recorder of requests, from arrival to end, and of steps; `started_ns` is the start of the run.

    The row of a request goes to `sink` when the request ends. Rows of steps wait for `flush_steps`, so that no step
    waits for the disk. `progress` is called with the number of requests that have ended; `tier` is the name of the
    engine's KV tier.
    """

    def __init__(
        self, sink: RowSink, started_ns: int, progress: Callable[[int], None] | None = None, tier: str | None = None
    ) -> None:
        self.sink = sink
        self.started_ns = started_ns
        self.finished = 0
        self._progress = progress
        self._tier = tier
        self._ended = 0
        self._returned_steps = 0
        self._lives: dict[int, _Life] = {}
        self._steps: list[dict[str, Any]] = []
        self._device_ns = 0
        self._launching_ns = 0

    @property
    def open_requests(self) -> int:
        """The number of requests that have not ended."""
        return len(self._lives)

    @property
    def launching_share(self) -> float:
        """The share of the steps' device time in which the host was still launching them.

        The device may have been idle at that time.
        """
        return self._launching_ns / max(self._device_ns, 1)

    def arrived(self, request: Request, arrival_ns: int, send_ns: int, queued_ns: int) -> None:
        """Note a new request, with the times at which it was due, was sent, and was given to the scheduler."""
        self._lives[request.id] = _Life(request, arrival_ns, send_ns, queued_ns)

    def planned(self, flight: Step) -> None:
        """Note the preemptions of a plan, and the grammars that were compiled before it.

        They are noted when the step is planned, because in the overlapped loop a preempted request may finish before
        this step runs.
        """
        for id, preempted_ns in flight.preempted_ns.items():
            if (life := self._lives.get(id)) is not None:
                life.preempted_at_ns = preempted_ns - self.started_ns
        for id, compiled_ns in flight.compiled_ns.items():
            if (life := self._lives.get(id)) is not None:
                life.compiled_ns = compiled_ns - self.started_ns
        for request in flight.plan.admitted:
            if (life := self._lives.get(request.id)) is not None:
                life.resumes_from_ns, life.preempted_at_ns = life.preempted_at_ns, None

    def ran(self, step: Step) -> None:
        """Note a step that has ended."""
        self._returned_steps += 1
        start_ns, end_ns = step.start_ns - self.started_ns, step.end_ns - self.started_ns
        for request in step.plan.admitted:
            if (life := self._lives.get(request.id)) is None:
                continue  # the request was preempted since then, and an earlier step has finished it
            if life.scheduled_ns is None:
                life.scheduled_ns = start_ns
            if life.resumes_from_ns is not None:
                life.preempted_ns += start_ns - life.resumes_from_ns
                life.resumes_from_ns = None
        for request in step.sampled:
            self._lives[request.id].token_times_ns.append(end_ns)
        for id, tokens, swapped in () if step.tier is None else step.tier.loads:
            if (life := self._lives.get(id)) is None:
                continue
            if swapped:
                life.swapped_in += tokens
            else:
                life.tier_hits += tokens
        self._device_ns += end_ns - start_ns
        self._launching_ns += step.launching_ns
        self._steps.append(self._step_row(step))
        for request in step.finished:
            self.finished += 1
            life = self._lives[request.id]
            if life.preempted_at_ns is not None:  # the request finished while it waited
                life.preempted_ns += end_ns - life.preempted_at_ns
            self.left(request, "finished", end_ns)

    def _step_row(self, step: Step) -> dict[str, Any]:
        plan, origin = step.plan, self.started_ns
        return {
            "replica": 0,
            "step": plan.seq,
            "plan_ns": step.plan_ns - origin,
            "start_ns": step.start_ns - origin,
            "end_ns": step.end_ns - origin,
            **dict(zip(AGGREGATES, aggregates_of(plan), strict=True)),
            "draft_tokens": plan.draft_tokens or None,
            **step.load._asdict(),
            "preempted": len(plan.preempted),
            "schedule_ns": step.scheduled_ns - step.plan_ns,
            "in_flight": plan.lag,
            "forward_ns": step.computed_ns - step.start_ns,
            "sample_ns": step.end_ns - step.computed_ns,
            **{name: getattr(step, name) for name in _AS_THEY_ARE},
            "op_ns": None if step.op_ns is None else list(step.op_ns.items()),
            "row_ids": [row.request.id for row in step.rows],
            "row_tokens": [row.tokens for row in step.rows],
            "preempted_ids": [request.id for request in plan.preempted],
            "stopped_ids": step.stopped,
            "masked_rows": plan.masked_rows or None,
            "mask_ns": step.mask_ns or None,
            **_tier_columns(step.tier, origin),
            "adapters": _adapter_numbers(step),
            **({} if step.expert_tokens is None else _expert_columns(step.expert_tokens)),
            **_row_drafts(step),
        }

    def left(
        self, request: Request, status: str, finish_ns: int | None = None, reason: str = "", end_ns: int | None = None
    ) -> None:
        """Note that `request` has ended with a `status` of the dataset `requests`; `finish_ns` if it finished."""
        life = self._lives.pop(request.id)
        gone = status == "cancelled" or reason == STOPPED
        self._ended += 1
        times = life.token_times_ns
        if request.compiling:
            life.compiled_ns = perf_counter_ns() - self.started_ns  # a lower bound on the time
        self.sink.add_request(
            **request.arrived.labels,
            replica=0,
            status=status,
            reason=reason or request.reason,
            prompt_tokens=request.prompt_len,
            output_tokens=len(times),
            arrival_ns=life.arrival_ns,
            send_ns=life.send_ns,
            queued_ns=life.queued_ns,
            scheduled_ns=life.scheduled_ns,
            first_token_ns=times[0] if times else None,
            finish_ns=finish_ns,
            prefix_hit_tokens=request.first_hit or 0,
            preemptions=request.preemptions,
            preempted_ns=life.preempted_ns,
            recomputed_tokens=max(request.recomputed, 0),
            token_times_ns=times,
            end_ns=end_ns,
            steps_before_end=self._returned_steps if gone else None,
            grammar_compile_ns=None if life.compiled_ns is None else life.compiled_ns - life.queued_ns,
            **self._tiered(life),
            **_request_drafts(request),
        )
        if self._progress is not None:
            self._progress(self._ended)

    def hung_up(self, request: Request, now_ns: int) -> None:
        """Note that `request` was aborted for its client.

        The client has hung up, or a stop string has ended the answer.
        """
        if request.truth.stop_ns is not None and request.outputs:
            self.left(request, "finished", now_ns, STOPPED, now_ns)
        else:
            self.left(request, "cancelled", None, "its client hung up", now_ns)

    def _tiered(self, life: _Life) -> dict[str, Any]:
        if self._tier is None:
            return {}
        hits = [(self._tier, life.tier_hits)] if life.tier_hits else []
        return {"tier_hit_tokens": hits, "swapped_in_tokens": life.swapped_in}

    def flush_steps(self) -> None:
        """Write the rows of steps that have ended to the sink."""
        for row in self._steps:
            self.sink.add_step(**row)
        self._steps.clear()

    def close(self) -> None:
        """End the recording; requests that have not ended get the status `unfinished`."""
        for life in list(self._lives.values()):
            self.left(life.request, "unfinished")
        self.flush_steps()


def experts_hit(tokens: NDArray[np.int32]) -> float:
    """Return the number of experts of a layer that got any of `tokens` `[layers, experts]`, averaged over layers.

    The weights of these experts are read.
    """
    return float((tokens > 0).sum(axis=1).mean())


def expert_imbalance(tokens: NDArray[np.int32]) -> dict[int, float]:
    """Return, for each number of devices, the tokens on the busiest device divided by the mean over all devices.

    The numbers of devices, in increasing order, are those that divide a layer's experts evenly.
    """
    layers, experts = tokens.shape
    total = tokens.sum(axis=1)

    def imbalance(devices: int) -> float:
        loads = tokens.reshape(layers, devices, -1).sum(axis=2)
        return float((loads.max(axis=1) * devices / total).mean())

    return {devices: imbalance(devices) for devices in range(2, experts + 1) if experts % devices == 0}


def _expert_columns(expert_tokens: NDArray[np.int32]) -> dict[str, Any]:
    return {
        "experts_hit": experts_hit(expert_tokens),
        "expert_imbalance": list(expert_imbalance(expert_tokens).items()),
        "expert_tokens": expert_tokens.sum(axis=0).tolist(),
    }


def _adapter_numbers(step: Step) -> dict[str, int] | None:
    its = step.adapters
    if its is None:
        return None
    loads = {"loads": its.loads, "load_ns": its.load_ns, "copies": len(its.copies), "copy_ns": step.copy_ns}
    return {"adapters": len(its.slots), "tokens": its.tokens, **loads}


def _row_drafts(step: Step) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    if step.plan.draft_tokens:
        columns["row_accepted"] = [step.accepted.get(row.request.id) for row in step.rows]
    if step.proposed is not None:
        columns["row_proposed"] = [step.proposed.get(row.request.id) for row in step.rows]
    return columns


def _request_drafts(request: Request) -> dict[str, Any]:
    names = ("drafts", "draft_tokens", "accepted_tokens")
    return {name: getattr(request, name) for name in names} if request.drafts else {}


def _tier_columns(tier: TierEvents | None, origin_ns: int) -> dict[str, Any]:
    if tier is None:
        return {}
    times = ("submitted_ns", "began_ns", "ended_ns")
    transfers = [one._asdict() | {name: getattr(one, name) - origin_ns for name in times} for one in tier.transfers]
    attempts = [
        {"plan_ns": one.plan_ns - origin_ns, "loaded_ids": one.loaded, "released_ids": one.released}
        for one in tier.attempts
    ]
    came = {"loaded_ids": tier.loaded, "released_ids": tier.released, "kv_attempts": attempts}
    in_flight = [one.in_flight for one in tier.attempts]
    return {**came, "kv_transfers": transfers, "kv_attempts_in_flight": in_flight if any(in_flight) else None}
