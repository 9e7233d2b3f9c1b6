"""Replaying a workload on the real engine, in real time, and recording it.

The clients are those of the simulator (`serving.clients`): a request is due at its intended arrival, in a closed loop
when another has ended, in a conversation a think time after the answer. Its times count from when it is due, so a
stalled engine cannot hide its own queue (no coordinated omission). The loop takes arrivals between steps; `send_ns`
says when it did. A structured request answers with JSON objects until its recorded length.

Outputs are forced, so that later turns can quote them, unless there are drafts: whether those are accepted is about
what the model itself would say, so it is let.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from heapq import heappop, heappush
from pathlib import Path
from statistics import median
from time import perf_counter_ns, sleep
from typing import Any

from realengine.ctrl_c import ctrl_c_heard
from realengine.engine import Engine
from realengine.grammar import ENDLESS_OBJECTS, json_grammar
from realengine.hardware import describe
from realengine.loop import drive
from realengine.run_recorder import RunRecorder
from realengine.segment_tokens import SegmentTokens, quotes
from realengine.sequence import TokenSequence
from realengine.step import Step
from serving.call_limit import watching
from serving.canary import canary_rows
from serving.clients import Clients
from serving.deployments.config import Deployment
from serving.request import Request, Status
from serving.workload import Workload, WorkloadRequest
from traces.parquet import write_parquet
from traces.recording import RecordingWriter

_SPIN_NS = 500_000  # sleep until this close to an arrival, then spin
FLUSH_NS = 50_000_000  # idle for longer than this: write buffered rows meanwhile
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
    hardware = describe(engine.deployment.device)
    run = run_columns(Path(out).name, workload, engine.deployment, hardware, engine.scheduler.pool.total, seed)
    writer = RecordingWriter(out, run, workload=offered, overwrite=overwrite)
    try:
        engine.reset()
        engine.watch_speed()
        before = canary(engine)
        forces = engine.deployment.scheduler.speculative is None
        texts = ReplayTexts(offered, engine.spec.vocab_size, forces)
        with watching(), no_cycle_search(), ctrl_c_heard() as stopped:
            recorder = RunRecorder(writer, perf_counter_ns(), progress, engine.tier_name)
            clients = _ReplayedClients(engine, offered, texts, recorder)
            drive(engine, clients, recorder, stopped)
            status = "interrupted" if stopped() and clients.busy else "complete"
        duration_ns = clients.now()
        recorder.close()
        texts.keep_sent(writer)
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


def run_columns(
    run_id: str,
    workload: Workload,
    deployment: Deployment,
    hardware: Mapping[str, str | int],
    num_blocks: int,
    seed: int,
) -> dict[str, Any]:
    """The columns of `runs` that are known before a replay: of one engine, with `num_blocks` KV blocks."""
    return {
        "run_id": run_id,
        "clock": "wall",
        "workload": workload.name,
        "deployment": deployment.model_dump_json(),
        "replicas": 1,
        "seed": seed,
        "hardware": json.dumps(hardware),
        "calibration": "",
        "num_blocks": num_blocks,
        "block_size": deployment.scheduler.block_size,
    }


class ReplayTexts:
    """Token ids of the requests of a workload: of their prompts, and those that their outputs are forced to.

    With drafts none are, because a draft is right or wrong by what the model says. Later turns quote what was
    said; of an answer that has not ended yet nobody knows that, so they quote other tokens, under a name of their own.
    """

    def __init__(self, workload: Workload, vocab_size: int, forces: bool) -> None:
        self._workload = workload
        self._tokens = SegmentTokens(vocab_size)
        self._forces = forces
        self._made = {request.id: self._make(request) for request in workload.requests}
        self._unlike: dict[int, WorkloadRequest] = {}  # as sent: they quote what was not said

    def _make(self, request: WorkloadRequest) -> tuple[list[int], list[int] | None]:
        return self._tokens.prompt(request), self._tokens.output(request) if self._forces else None

    def sent(self, request: WorkloadRequest) -> WorkloadRequest:
        """`request` as it is sent now: with its own names for what it quotes and nobody has said."""
        prompt = request.prompt if self._forces else self._tokens.quotable(request.prompt)
        if prompt == request.prompt:
            return request
        self._unlike[request.id] = sent = replace(request, prompt=prompt)
        return sent

    def of(self, sent: WorkloadRequest) -> tuple[list[int], list[int] | None]:
        """The ids of its prompt, and of its output, if that is forced; to be asked once."""
        made = self._made.pop(sent.id)
        return made if self._forces or not quotes(sent.prompt) else self._make(sent)

    def said(self, id: int, output: list[int]) -> None:
        """What the output of request `id` was, which was not forced."""
        self._tokens.note_output(id, output)

    def keep_sent(self, writer: RecordingWriter) -> None:
        """Where prompts were not those of the workload, the recording's workload has the ones that were sent."""
        if self._unlike:
            requests = self._workload.requests
            sent = [replace(one, prompt=self._unlike.get(one.id, one).prompt) for one in requests]
            write_parquet(replace(self._workload, requests=sent), writer.workload_path)


@cache
def _endless_objects() -> str:
    return json_grammar(ENDLESS_OBJECTS)


class RequestsAtEngine:
    """Requests of a workload that an engine has, each followed by `recorder`."""

    def __init__(self, engine: Engine, recorder: RunRecorder) -> None:
        self._engine, self._recorder = engine, recorder
        self._sequences: dict[int, TokenSequence] = {}  # of those whose output is not forced

    def now(self) -> int:
        """Nanoseconds from the start of the run."""
        return perf_counter_ns() - self._recorder.started_ns

    def add(self, arrived: WorkloadRequest, prompt: list[int], output: list[int] | None, send_ns: int) -> bool:
        """Queue a request with token ids of its prompt and, if it is forced, of its output; whether it is taken."""
        engine = self._engine
        grammar = _endless_objects() if arrived.structured else ""
        request = engine.add(arrived, prompt, grammar=grammar, forced=output)
        self._recorder.arrived(request, arrived.arrival_ns, send_ns, self.now())
        if request.status is Status.REJECTED:
            self._recorder.left(request, "rejected")
            return False
        if output is None:
            self._sequences[request.id] = engine.sequences[request.id]
        return True

    def hang_up(self, id: int) -> Request | None:
        """The request, whose client wants no more of it; None if it has ended already."""
        if (request := self._engine.abort(id)) is not None:
            self._recorder.hung_up(request, self.now())
        return request

    def ended(self, id: int) -> list[int] | None:
        """What a request that has left had said; None where it was told what to say."""
        sequence = self._sequences.pop(id, None)
        return None if sequence is None else list(sequence.outputs)


class OfferedRequests:
    """What the clients of a workload do, and when: `Clients` that also hang up."""

    def __init__(self, workload: Workload) -> None:
        self._clients = Clients(workload)
        self._hang_ups: list[tuple[int, int]] = []  # a heap: when clients hang up on their requests, and those's ids

    @property
    def exhausted(self) -> bool:
        """Whether every request of the workload has been sent."""
        return self._clients.exhausted

    @property
    def next_ns(self) -> int | None:
        """When something comes that no answer brings about."""
        hang_up_ns = self._hang_ups[0][0] if self._hang_ups else None
        return min((ns for ns in (self._clients.next_ns, hang_up_ns) if ns is not None), default=None)

    def hang_ups(self, now_ns: int) -> Iterator[int]:
        """The requests on which clients hang up by now, answered or not."""
        while self._hang_ups and self._hang_ups[0][0] <= now_ns:
            yield heappop(self._hang_ups)[1]

    def arrivals(self, now_ns: int) -> Iterator[WorkloadRequest]:
        """The requests that are due by now."""
        while (next_ns := self._clients.next_ns) is not None and next_ns <= now_ns:
            arrived = self._clients.pop()
            if (leaves_ns := arrived.leaves_ns) is not None:
                heappush(self._hang_ups, (leaves_ns, arrived.id))
            yield arrived

    def ended(self, request: WorkloadRequest, now_ns: int) -> None:
        """`request` has left, answered or not."""
        self._clients.ended(request, now_ns)


class _ReplayedClients:
    """Those of a workload: each request is sent when it is due."""

    def __init__(self, engine: Engine, workload: Workload, texts: ReplayTexts, recorder: RunRecorder) -> None:
        self._requests = RequestsAtEngine(engine, recorder)
        self.now = self._requests.now
        self._texts = texts
        self._recorder = recorder
        self._offered = OfferedRequests(workload)

    @property
    def busy(self) -> bool:
        return bool(self._recorder.open_requests) or not self._offered.exhausted

    def take(self) -> None:
        now = self.now()
        for id in self._offered.hang_ups(now):
            if (request := self._requests.hang_up(id)) is not None:
                self._ended(request, self.now())
        for arrived in map(self._texts.sent, self._offered.arrivals(now)):
            send_ns = self.now()
            if not self._requests.add(arrived, *self._texts.of(arrived), send_ns):
                self._offered.ended(arrived, send_ns)

    def ran(self, step: Step) -> None:
        for request in step.finished:
            self._ended(request, step.end_ns - self._recorder.started_ns)

    def _ended(self, request: Request, now_ns: int) -> None:
        if (said := self._requests.ended(request.id)) is not None:
            self._texts.said(request.id, said)
        self._offered.ended(request.arrived, now_ns)

    def await_(self, stopped: Callable[[], bool]) -> None:
        arrival_ns = self._offered.next_ns
        if arrival_ns is None:
            if not self.busy:
                return  # the last client has just hung up
            raise RuntimeError(f"{self._recorder.open_requests} requests left, nothing to run: a scheduling bug")
        if arrival_ns - self.now() > FLUSH_NS:
            self._recorder.flush_steps()
        while (ahead := arrival_ns - self.now() - _SPIN_NS) > 0 and not stopped():
            sleep(min(ahead, _LONGEST_SLEEP_NS) / 1e9)
        while self.now() < arrival_ns and not stopped():
            pass


@contextmanager
def no_cycle_search() -> Iterator[None]:
    """A search for reference cycles would stop the engine for longer than a step takes."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
