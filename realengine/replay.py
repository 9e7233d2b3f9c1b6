"""Replaying a workload on the real engine, in real time, and recording it.

The clients are those of the simulator (`serving.clients`): a request is due at its intended arrival, in a closed loop
when another has ended, in a conversation a think time after the answer. Its times count from when it is due, so a
stalled engine cannot hide its own queue (no coordinated omission). The loop takes arrivals between steps; `send_ns`
says when it did. A structured request has the masks of any JSON object: what they cost is real, what they say is not.

Outputs are forced, so that later turns can quote them, unless there are drafts: whether those are accepted is about
what the model itself would say, so it is let.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from pathlib import Path
from statistics import median
from time import perf_counter_ns, sleep

from realengine.ctrl_c import ctrl_c_heard
from realengine.engine import Engine
from realengine.grammar import ANY_OBJECT, json_grammar
from realengine.hardware import describe
from realengine.loop import drive
from realengine.run_recorder import RunRecorder
from realengine.segment_tokens import SegmentTokens
from realengine.sequence import TokenSequence
from realengine.step import Step
from serving.canary import canary_rows
from serving.clients import Clients
from serving.request import Status
from serving.workload import Workload
from traces.recording import RecordingWriter

_SPIN_NS = 500_000  # sleep until this close to an arrival, then spin
_FLUSH_NS = 50_000_000  # idle for longer than this: write buffered rows meanwhile
_LONGEST_SLEEP_NS = 100_000_000  # then look whether Ctrl-C was pressed
_CANARY_REPEATS = 5


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
        tokens = SegmentTokens(engine.spec.vocab_size)
        texts = {request.id: (tokens.prompt(request), tokens.output(request)) for request in requests}
        with engine.watch.on(), no_cycle_search(), ctrl_c_heard() as stopped:
            recorder = RunRecorder(writer, perf_counter_ns(), progress)
            clients = _ReplayedClients(engine, offered, tokens, texts, recorder)
            drive(engine, clients, recorder, stopped)
            status = "interrupted" if stopped() and clients.busy else "complete"
        duration_ns = clients.now()
        recorder.close()
        after = canary(engine)
        notes = {
            "canary_before_ns": before,
            "canary_after_ns": after,
            **engine.notes,
            "launching_share": recorder.launching_share,
        }
        writer.close(status, duration_ns=duration_ns, notes=json.dumps(notes))
    except BaseException:
        writer.discard()
        raise
    return Replayed(status, len(requests), recorder.finished, duration_ns, before, after)


class _ReplayedClients:
    """Those of a workload: each request is sent when it is due."""

    def __init__(
        self,
        engine: Engine,
        workload: Workload,
        tokens: SegmentTokens,
        texts: dict[int, tuple[list[int], list[int]]],
        recorder: RunRecorder,
    ) -> None:
        self._engine = engine
        self._forces = engine.deployment.scheduler.speculative is None
        self._tokens = tokens
        self._speaking: dict[int, TokenSequence] = {}  # whose outputs are not forced
        self._texts = texts  # token ids of prompt and output, by request
        self._recorder = recorder
        self._clients = Clients(workload)
        self._hang_ups: list[tuple[int, int]] = []  # a heap: when clients hang up on their requests, and those's ids

    def now(self) -> int:
        """Nanoseconds from the start of the run."""
        return perf_counter_ns() - self._recorder.started_ns

    @property
    def busy(self) -> bool:
        return bool(self._recorder.open_requests) or not self._clients.exhausted

    @property
    def _next_ns(self) -> int | None:
        """When something comes that no answer brings about."""
        hang_up_ns = self._hang_ups[0][0] if self._hang_ups else None
        return min((ns for ns in (self._clients.next_ns, hang_up_ns) if ns is not None), default=None)

    def take(self) -> None:
        now = self.now()
        while self._hang_ups and self._hang_ups[0][0] <= now:
            self._hang_up(heappop(self._hang_ups)[1])
        while (next_ns := self._clients.next_ns) is not None and next_ns <= now:
            arrived = self._clients.pop()
            send_ns = self.now()
            prompt, output = self._texts.pop(arrived.id)
            if self._tokens.quotes(arrived):
                prompt = self._tokens.prompt(arrived)
            grammar = self._engine.grammars.make(json_grammar(ANY_OBJECT)) if arrived.structured else None
            forces = self._forces or arrived.structured
            request = self._engine.add(arrived, prompt, forced=output if forces else None, grammar=grammar)
            if not forces and request.status is not Status.REJECTED:
                self._speaking[request.id] = self._engine.sequences[request.id]
            self._recorder.arrived(request, arrived.arrival_ns, send_ns, self.now())
            if request.status is Status.REJECTED:
                self._recorder.left(request, "rejected")
                self._clients.ended(arrived, send_ns)
            elif arrived.cancel_ns is not None:
                heappush(self._hang_ups, (arrived.cancel_ns, arrived.id))

    def _hang_up(self, id: int) -> None:
        if (request := self._engine.abort(id)) is not None:
            now_ns = self.now()
            self._recorder.left(request, "cancelled", None, "its client hung up", now_ns)
            self._note_output(id)
            self._clients.ended(request.arrived, now_ns)

    def ran(self, step: Step) -> None:
        for request in step.finished:
            self._note_output(request.id)
            self._clients.ended(request.arrived, step.end_ns - self._recorder.started_ns)

    def _note_output(self, id: int) -> None:
        if (sequence := self._speaking.pop(id, None)) is not None:
            self._tokens.note_output(id, sequence.outputs)

    def await_(self, stopped: Callable[[], bool]) -> None:
        arrival_ns = self._next_ns
        if arrival_ns is None:
            raise RuntimeError(f"{self._recorder.open_requests} requests left, nothing to run: a scheduling bug")
        if arrival_ns - self.now() > _FLUSH_NS:
            self._recorder.flush_steps()
        while (ahead := arrival_ns - self.now() - _SPIN_NS) > 0 and not stopped():
            sleep(min(ahead, _LONGEST_SLEEP_NS) / 1e9)
        while self.now() < arrival_ns and not stopped():
            pass


@contextmanager
def no_cycle_search() -> Iterator[None]:
    """A search for reference cycles would stop the engine for longer than a step takes."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
