"""The replay of a workload on the real engine, in real time, with a recording.

The clients are the same as in the simulator (`tokentwin.serving.clients`). A request is due at its arrival time; in a
closed loop it is due when another request has ended, and in a conversation a think time after the previous answer.
Latencies of a request count from the time at which it is due, not from its sending. So the waits that a stalled engine
causes are included (no coordinated omission). The loop takes arrivals between steps, at the time `send_ns`. The answer
to a structured request is a list of JSON objects that goes on up to the recorded length. A request that changes logits
has small penalties.

Outputs are forced, so that later turns can quote them. With speculative decoding they are not forced, because the
model's own output decides whether drafts are accepted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from time import perf_counter_ns, sleep

from tokentwin.realengine.devices.machine import describe
from tokentwin.realengine.engine import Engine
from tokentwin.realengine.grammar import ENDLESS_OBJECTS, json_grammar
from tokentwin.realengine.logit_rules import PENALTIES
from tokentwin.realengine.loop import drive
from tokentwin.realengine.offered_workload import OfferedRequests, Replayed, ReplayTexts, adapters_of, run_columns
from tokentwin.realengine.run_recorder import RunRecorder
from tokentwin.realengine.sequence import TokenSequence
from tokentwin.realengine.step import Step
from tokentwin.realengine.undisturbed import ctrl_c_heard, no_cycle_search
from tokentwin.serving.canary import canary_rows
from tokentwin.serving.request import Request, Status
from tokentwin.serving.workload import Workload, WorkloadRequest, with_session_ends
from tokentwin.traces.recording_writer import RecordingWriter

_SPIN_NS = 500_000  # sleep until this close to an arrival, then spin
FLUSH_NS = 50_000_000  # buffered rows are written when idle for longer than this
_LONGEST_SLEEP_NS = 100_000_000  # interval for checking whether Ctrl-C was pressed
_CANARY_REPEATS = 5


def canary(engine: Engine) -> int:
    """Return the median time of a fixed reference step in ns.

    A change of this time means that the machine has changed, not the model.
    """
    rows = canary_rows(engine.deployment.scheduler.max_num_seqs)
    return int(median(engine.run_dummy(rows) for _ in range(_CANARY_REPEATS)))


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

    `progress` is called with the number of requests that have ended. Ctrl-C ends the run; the recording then has what
    was recorded until then.
    """
    requests = list(workload.requests)
    engine.check_adapters(adapters_of(requests))
    offered = replace(workload, requests=requests)
    if engine.deployment.scheduler.kv_eviction == "session":
        offered = with_session_ends(offered)
    hardware = describe(engine.deployment.device)
    run = run_columns(Path(out).name, workload, engine.deployment, hardware, engine.scheduler.pool.total, seed)
    writer = RecordingWriter(out, run, workload=offered, overwrite=overwrite)
    try:
        engine.reset()
        engine.watch_speed()
        before = canary(engine)
        forces = engine.deployment.scheduler.speculative is None
        texts = ReplayTexts(offered, engine.spec.vocab_size, forces)
        with no_cycle_search(), ctrl_c_heard() as stopped:
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


@cache
def _endless_objects() -> str:
    return json_grammar(ENDLESS_OBJECTS)


class RequestsAtEngine:
    """The requests of a workload that an engine has; `recorder` records each of them."""

    def __init__(self, engine: Engine, recorder: RunRecorder) -> None:
        self._engine, self._recorder = engine, recorder
        self._sequences: dict[int, TokenSequence] = {}  # requests whose output is not forced

    def now(self) -> int:
        """Return the time since the start of the run in nanoseconds."""
        return perf_counter_ns() - self._recorder.started_ns

    def add(self, arrived: WorkloadRequest, prompt: list[int], output: list[int] | None, send_ns: int) -> bool:
        """Queue a request with the token ids `prompt` and, if forced, `output`; return whether it was accepted."""
        engine = self._engine
        grammar = _endless_objects() if arrived.structured else ""
        rules = PENALTIES if arrived.changes_logits else None
        score_top = 0 if arrived.scores_prompt else None
        request = engine.add(arrived, prompt, grammar=grammar, forced=output, rules=rules, score_top=score_top)
        self._recorder.arrived(request, arrived.arrival_ns, send_ns, self.now())
        if request.status is Status.REJECTED:
            self._recorder.left(request, "rejected")
            return False
        if output is None:
            self._sequences[request.id] = engine.sequences[request.id]
        return True

    def hang_up(self, id: int) -> Request | None:
        """Abort a request whose client has hung up, and return it; return None if it has already ended."""
        if (request := self._engine.abort(id)) is not None:
            self._recorder.hung_up(request, self.now())
        return request

    def ended(self, id: int) -> list[int] | None:
        """Return the output of a request that has ended; None if the output was forced."""
        sequence = self._sequences.pop(id, None)
        return None if sequence is None else list(sequence.outputs)


class _ReplayedClients:
    """The clients of a workload, which send each request when it is due."""

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
            if not self._requests.add(arrived, *self._texts.tokens(arrived), send_ns):
                self._offered.ended(arrived, send_ns)

    def ran(self, step: Step) -> None:
        for request in step.finished:
            self._ended(request, step.end_ns - self._recorder.started_ns)

    def _ended(self, request: Request, now_ns: int) -> None:
        if (said := self._requests.ended(request.id)) is not None:
            self._texts.said(request.id, said)
        self._offered.ended(request.truth, now_ns)

    def await_(self, stopped: Callable[[], bool]) -> None:
        arrival_ns = self._offered.next_ns
        if arrival_ns is None:
            if not self.busy:
                return  # the last client has just hung up
            raise RuntimeError(f"{self._recorder.open_requests} requests left, nothing to run: a scheduling bug")
        if arrival_ns - self.now() > FLUSH_NS:
            self._recorder.flush_steps()
        while (left_ns := arrival_ns - self.now() - _SPIN_NS) > 0 and not stopped():
            sleep(min(left_ns, _LONGEST_SLEEP_NS) / 1e9)
        while self.now() < arrival_ns and not stopped():
            pass
