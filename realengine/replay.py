"""Replaying a workload on the real engine, in real time, and recording it.

The clients are those of the simulator (`serving.clients`): a request is due at its intended arrival, in a closed loop
when another has ended, in a conversation a think time after the answer. Its times count from when it is due, so a
stalled engine cannot hide its own queue (no coordinated omission). The loop takes arrivals between steps; `send_ns`
says when it did.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from time import perf_counter_ns, sleep
from typing import Any

from realengine.ctrl_c import ctrl_c_heard
from realengine.engine import Engine, Flight, Step
from realengine.hardware import describe
from realengine.segment_tokens import SegmentTokens
from serving.canary import canary_rows
from serving.clients import Clients
from serving.request import Request, Status
from serving.step_plan import AGGREGATES, aggregates_of
from serving.workload import Workload
from traces.recording import RecordingWriter

_SPIN_NS = 500_000  # sleep until this close to an arrival, then spin
_FLUSH_NS = 50_000_000  # idle for longer than this: write buffered rows meanwhile
_LONGEST_SLEEP_NS = 100_000_000  # then look whether Ctrl-C was pressed
_CANARY_REPEATS = 5


@dataclass(slots=True)
class _Life:
    """When things happened to one request, in ns from the start of the run."""

    request: Request
    arrival_ns: int
    send_ns: int
    queued_ns: int
    scheduled_ns: int | None = None
    preempted_at_ns: int | None = None
    resumes_from_ns: int | None = None  # preempted then, and admitted again in a step not yet noted
    preempted_ns: int = 0
    token_times_ns: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Replayed:
    """How a replay went: `status` is `complete` or `interrupted`; canaries are medians before and after."""

    status: str
    requests: int
    finished: int
    duration_ns: int
    canary_before_ns: int
    canary_after_ns: int


def canary(engine: Engine) -> int:
    """Median time of a fixed reference step in ns: when it drifts, the machine is disturbed, not the model."""
    rows = canary_rows(engine.deployment.scheduler.max_num_seqs)
    return int(median(engine.run_dummy(rows) for _ in range(_CANARY_REPEATS)))


def at_once(workload: Workload) -> Workload:
    """The same requests, all offered at the start: saturation."""
    return replace(workload, requests=[replace(request, arrival_ns=0) for request in workload.requests])


def record(
    workload: Workload,
    engine: Engine,
    out: str | Path,
    *,
    seed: int = 0,
    overwrite: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Replayed:
    """Replay `workload` and write a recording to `out`.

    `progress` is called with the number of requests that have ended. Ctrl-C ends the run and writes what there is.
    """
    requests = list(workload.requests)
    offered = replace(workload, requests=requests)
    deployment = engine.deployment
    run = {
        "run_id": Path(out).name,
        "clock": "wall",
        "workload": workload.name,
        "deployment": deployment.model_dump_json(),
        "replicas": 1,
        "seed": seed,
        "hardware": json.dumps(describe(deployment.device)),
        "calibration": "",
        "num_blocks": engine.scheduler.pool.total,
        "block_size": deployment.scheduler.block_size,
    }
    writer = RecordingWriter(out, run, workload=offered, overwrite=overwrite)
    try:
        engine.reset()
        engine.watch_speed()
        before = canary(engine)
        replay = _Replay(engine, offered, writer, progress)
        status = replay.run()
        after = canary(engine)
        notes = {
            "canary_before_ns": before,
            "canary_after_ns": after,
            "attention": engine.attention,
            "model": engine.source,
            "memory": engine.memory_report,
            "launching_share": replay.launching_share,
        }
        writer.close(status, duration_ns=replay.now(), notes=json.dumps(notes))
    except BaseException:
        writer.discard()
        raise
    return Replayed(status, len(requests), replay.finished, replay.duration_ns, before, after)


class _Replay:
    """The loop: take arrivals, run a step, note what happened."""

    def __init__(
        self,
        engine: Engine,
        workload: Workload,
        writer: RecordingWriter,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._engine = engine
        self._writer = writer
        self._progress = progress
        self._clients = Clients(workload)
        tokens = SegmentTokens(engine.spec.vocab_size)
        self._tokens = {r.id: (tokens.prompt(r), tokens.output(r)) for r in workload.requests}
        self._lives: dict[int, _Life] = {}
        self._steps: list[dict[str, Any]] = []
        self._started_ns = 0
        self._last_end_ns = 0
        self._ended = 0
        self._device_ns = 0
        self._launching_ns = 0
        self.finished = 0
        self.duration_ns = 0

    @property
    def launching_share(self) -> float:
        """How much of the steps' time on the device the host was still launching them, so that it may have waited."""
        return self._launching_ns / max(self._device_ns, 1)

    def now(self) -> int:
        return perf_counter_ns() - self._started_ns

    def run(self) -> str:
        try:
            gc.collect()
            gc.freeze()
            gc.disable()
            with ctrl_c_heard() as stopped, self._engine.watch.on():
                self._loop(stopped)
                status = "interrupted" if stopped() and self._busy else "complete"
        finally:
            gc.enable()
            gc.unfreeze()
        self.duration_ns = self.now()
        for life in list(self._lives.values()):
            self._write_request(life, "unfinished", None)
        self._flush_steps()
        return status

    @property
    def _busy(self) -> bool:
        return bool(self._lives) or not self._clients.exhausted

    def _loop(self, stopped: Callable[[], bool]) -> None:
        self._started_ns = perf_counter_ns()
        while self._busy and not stopped():
            self._take_arrivals()
            if self._engine.has_room and (flight := self._engine.launch()):
                self._note_plan(flight)
                if self._engine.has_room:
                    continue  # for another, into which new arrivals may get
            step = self._engine.finish()
            if step is not None:
                self._note(step)
            elif (next_ns := self._clients.next_ns) is not None:
                self._wait_until(next_ns, stopped)
            elif self._lives:
                raise RuntimeError(f"{len(self._lives)} requests left and nothing to run: a scheduling bug")
        while stopped() and (step := self._engine.finish()) is not None:
            self._note(step)  # it was launched before Ctrl-C was pressed

    def _take_arrivals(self) -> None:
        now = self.now()
        while (next_ns := self._clients.next_ns) is not None and next_ns <= now:
            arrived = self._clients.pop()
            send_ns = self.now()
            prompt, output = self._tokens.pop(arrived.id)
            request = self._engine.add(arrived, prompt, forced=output)
            life = _Life(request, arrived.arrival_ns, send_ns, self.now())
            self._lives[request.id] = life
            if request.status is Status.REJECTED:
                self._write_request(life, "rejected", None)
                self._clients.ended(arrived, send_ns)

    def _wait_until(self, arrival_ns: int, stopped: Callable[[], bool]) -> None:
        if arrival_ns - self.now() > _FLUSH_NS:
            self._flush_steps()
        while (ahead := arrival_ns - self.now() - _SPIN_NS) > 0 and not stopped():
            sleep(min(ahead, _LONGEST_SLEEP_NS) / 1e9)
        while self.now() < arrival_ns and not stopped():
            pass

    def _note_plan(self, flight: Flight) -> None:
        """Preemptions count from the plan: in the overlapped loop a request may finish before that step runs."""
        for id, preempted_ns in flight.preempted_ns.items():
            if (life := self._lives.get(id)) is not None:
                life.preempted_at_ns = preempted_ns - self._started_ns
        for request in flight.plan.admitted:
            life = self._lives[request.id]
            life.resumes_from_ns, life.preempted_at_ns = life.preempted_at_ns, None

    def _note(self, step: Step) -> None:
        origin = self._started_ns
        start_ns, end_ns = step.start_ns - origin, step.end_ns - origin
        for request in step.plan.admitted:
            if (life := self._lives.get(request.id)) is None:
                continue  # preempted since, and finished by a step before
            if life.scheduled_ns is None:
                life.scheduled_ns = start_ns
            if life.resumes_from_ns is not None:
                life.preempted_ns += start_ns - life.resumes_from_ns
                life.resumes_from_ns = None
        for request in step.sampled:
            self._lives[request.id].token_times_ns.append(end_ns)
        self._device_ns += end_ns - start_ns
        self._launching_ns += step.launching_ns
        self._steps.append(self._step_row(step))
        for request in step.finished:
            self.finished += 1
            life = self._lives[request.id]
            if life.preempted_at_ns is not None:  # it finished while it waited
                life.preempted_ns += end_ns - life.preempted_at_ns
            self._write_request(life, "finished", end_ns)
            self._clients.ended(request.arrived, end_ns)

    def _step_row(self, step: Step) -> dict[str, Any]:
        plan, origin = step.plan, self._started_ns
        return {
            "replica": 0,
            "step": plan.seq,
            "plan_ns": step.plan_ns - origin,
            "start_ns": step.start_ns - origin,
            "end_ns": step.end_ns - origin,
            **dict(zip(AGGREGATES, aggregates_of(plan), strict=True)),
            "draft_tokens": plan.draft_tokens or None,
            "running": step.load.running,
            "waiting": step.load.waiting,
            "used_blocks": step.load.used_blocks,
            "waiting_blocks": step.load.waiting_blocks,
            "preempted": len(plan.preempted),
            "schedule_ns": step.scheduled_ns - step.plan_ns,
            "in_flight": plan.lag,
            "prepare_ns": step.prepared_ns - step.scheduled_ns,
            "launch_ns": step.launch_ns,
            "host_ns": step.host_ns,
            "forward_ns": step.computed_ns - step.start_ns,
            "sample_ns": step.end_ns - step.computed_ns,
            "graph": step.graph,
            "op_ns": None if step.op_ns is None else list(step.op_ns.items()),
            "row_ids": [row.request.id for row in step.rows],
            "row_tokens": [row.tokens for row in step.rows],
            "preempted_ids": [request.id for request in plan.preempted],
            "stopped_ids": step.stopped,
            "thread_ns": step.thread_ns,
            "speed": step.speed,
        }

    def _write_request(self, life: _Life, status: str, finish_ns: int | None) -> None:
        request, arrived = life.request, life.request.arrived
        del self._lives[request.id]
        self._ended += 1
        times = life.token_times_ns
        self._writer.add_request(
            request_id=request.id,
            replica=0,
            tenant=arrived.tenant,
            slo_class=arrived.slo_class,
            session=arrived.session,
            turn=arrived.turn,
            priority=request.priority,
            status=status,
            reason=request.reason,
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
        )
        if self._progress is not None:
            self._progress(self._ended)

    def _flush_steps(self) -> None:
        for row in self._steps:
            self._writer.add_step(**row)
        self._steps.clear()
