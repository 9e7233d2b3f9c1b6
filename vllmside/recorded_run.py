"""A recording made from the events of one engine, outside of the engine's loop.

Prompts become segments by vLLM's hashes of KV blocks: equal prefixes get equal names. Texts, tokens and hashes are not
stored. Values that a scheduler cannot know are null.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from tokentwin.serving.step_plan import AGGREGATES, Padding, StepPlan, aggregates_of
from tokentwin.serving.workload import WorkloadRequest
from tokentwin.traces.shared_prefixes import SharedPrefixes
from tokentwin.vllmside.engine_events import Arrived, Ended, Event, Flight

_GONE = "its client hung up, or a stop string ended it"
_SERVED_NAME = re.compile(r"(?:chatcmpl-(?P<chat>.+)|cmpl-(?P<completion>.+)-\d+)-[0-9a-f]{8}")
_FINISHED = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION")
_Times = partial(array, "q")


@dataclass(slots=True)
class _Progress:
    """The progress of a request; times are nanoseconds from the start of the run."""

    came: Arrived
    request: WorkloadRequest
    scheduled_ns: int | None = None
    hit: int = 0
    compiled_ns: int | None = None
    preempted_at_ns: int | None = None
    preempted_ns: int = 0
    recomputed: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    token_times_ns: array[int] = field(default_factory=_Times)


class RecordedRows(Protocol):
    """A receiver of rows: a `LiveRecording`, or a caller that waits for them."""

    @property
    def goes_on(self) -> bool: ...
    def arrived(self, request: WorkloadRequest) -> None: ...
    def add_request(self, row: Mapping[str, Any]) -> None: ...
    def add_step(self, row: Mapping[str, Any]) -> None: ...
    def close(self, **run: Any) -> None: ...


class RecordedRun:
    """A converter of events, which come in order, to rows for `recording`.

    Attributes:
        block_size: number of tokens of a block with one hash
        most_blocks: maximum number of blocks that `SharedPrefixes` remembers
        lookahead: number of tokens after a block that its hash includes
    """

    def __init__(self, recording: RecordedRows, block_size: int, most_blocks: int, lookahead: int = 0) -> None:
        self._recording = recording
        self._prefixes = SharedPrefixes(block_size, most_blocks, lookahead)
        self._open: dict[int, _Progress] = {}
        self._contents: dict[str, str] = {}
        self._arrival_ns = 0
        self._steps = 0
        self._end_ns = 0  # end of the last step
        self._steady: list[int] = []  # requests that got a token in each of the last steps, which ended at `_steady_ns`
        self._steady_ns = _Times()

    @property
    def goes_on(self) -> bool:
        """True while the recording is written."""
        return self._recording.goes_on

    def take(self, event: Event) -> None:
        """Add the next event to the recording."""
        if isinstance(event, Flight):
            self._ran(event)
        elif isinstance(event, Arrived):
            self._arrived(event)
        else:
            self._ended(event)

    def close(self, duration_ns: int, status: str, notes: Mapping[str, Any]) -> None:
        """Close the recording; requests that have not ended get the status `unfinished`."""
        self._spread()
        for progress in list(self._open.values()):
            self._leave(progress, "unfinished")
        all_notes = json.dumps({**notes, "ambiguous_blocks": self._prefixes.ambiguous})
        self._recording.close(status=status, duration_ns=duration_ns, notes=all_notes)

    def _arrived(self, came: Arrived) -> None:
        # The requests of a workload are ordered by arrival, but a scheduler may receive them in another order.
        self._arrival_ns = max(self._arrival_ns, came.arrival_ns)
        request = WorkloadRequest(
            came.id,
            self._arrival_ns,
            self._prefixes.prompt(came.id, came.keys, came.prompt_tokens),
            came.limit,
            came.priority,
            structured=came.structured,
            tenant=came.tenant,
            slo_class=came.slo_class,
            adapter=came.adapter,
            items=tuple(item._replace(content=self._content(item.content)) for item in came.items),
            skip_reading_prefix_cache=came.skips_cache,
            changes_logits=came.changes_logits,
            scores_prompt=came.scores_prompt,
        )
        self._open[came.id] = _Progress(came, request)
        self._recording.arrived(request)

    def _content(self, hashed: str) -> str:
        """Return a name for an image's content, so that its hash is not stored."""
        return self._contents.setdefault(hashed, f"item{len(self._contents)}")

    def _ran(self, flight: Flight) -> None:
        # A step begins with its adapters in their slots, after the previous step has ended.
        start_ns = max(flight.planned_ns + flight.adapter_work.took_ns, self._end_ns)
        self._end_ns = flight.end_ns
        open_requests = self._open
        for id in flight.compiled:
            if id in open_requests:
                open_requests[id].compiled_ns = flight.plan_ns
        for id, computed in flight.preempted:
            if id in open_requests:
                open_requests[id].preempted_at_ns = flight.plan_ns
                open_requests[id].recomputed += computed
        for id, cached in flight.admitted:
            if id in open_requests:
                _admit(open_requests[id], cached, start_ns)
        self._note_tokens(flight)
        for id, count in flight.drafts.items():
            if id in open_requests:
                progress = open_requests[id]
                progress.drafts += 1
                progress.draft_tokens += count
                progress.accepted_tokens += (flight.accepted or {}).get(id, 0)
        self._recording.add_step(self._step_row(flight, start_ns))
        self._steps += 1

    def _note_tokens(self, flight: Flight) -> None:
        """Note the output tokens of a step.

        Most steps give a token to the same requests as the previous step. Their token times are collected once for all
        of these requests, and copied to each of them later.
        """
        single = flight.counts.count(1) == len(flight.counts)
        if not (single and flight.got == self._steady):
            self._spread()
            self._steady = flight.got
        if single:
            self._steady_ns.append(flight.end_ns)
            return
        self._steady = []
        for id, count in zip(flight.got, flight.counts, strict=True):
            if id in self._open:
                self._open[id].token_times_ns.extend([flight.end_ns] * count)

    def _spread(self) -> None:
        """Copy the common token times to each request of `_steady`."""
        if self._steady_ns:
            for id in self._steady:
                if id in self._open:
                    self._open[id].token_times_ns.extend(self._steady_ns)
            self._steady_ns = _Times()

    def _step_row(self, flight: Flight, start_ns: int) -> dict[str, Any]:
        plan = _plan(flight)
        drafted = {
            "draft_tokens": plan.draft_tokens or None,
            "row_accepted": _by_row(flight, flight.accepted),
            "row_proposed": _by_row(flight, flight.proposed),
        }
        return {
            "replica": 0,
            "step": self._steps,
            "plan_ns": flight.plan_ns,
            "start_ns": start_ns,
            "end_ns": flight.end_ns,
            **dict(zip(AGGREGATES, aggregates_of(plan), strict=True)),
            **drafted,
            "running": flight.running,
            "waiting": flight.waiting,
            "used_blocks": flight.used_blocks,
            "preempted": len(flight.preempted),
            "in_flight": flight.in_flight,
            "schedule_ns": flight.planned_ns - flight.plan_ns,
            "thread_ns": None if flight.thread_ns is None else flight.thread_ns - flight.adapter_work.thread_ns,
            "speed": flight.speed,
            "row_ids": flight.ids,
            "row_tokens": flight.tokens,
            "preempted_ids": [id for id, _ in flight.preempted],
            "stopped_ids": flight.stopped,
            "masked_rows": plan.masked_rows or None,
            "adapters": _adapters(flight),
        }

    def _ended(self, ended: Ended) -> None:
        progress = self._open.get(ended.id)
        if progress is None:
            return
        self._spread()
        self._prefixes.answered(ended.id, progress.request.prompt, ended.keys, ended.tokens)
        if ended.status in _FINISHED:
            self._leave(progress, "finished", ended)
        elif ended.status == "FINISHED_ABORTED":
            self._leave(progress, "cancelled", ended, _GONE)
        elif ended.status == "FINISHED_IGNORED":
            self._leave(progress, "rejected", ended, "vLLM ignored it")
        else:
            self._leave(progress, "aborted", ended, f"vLLM ended it: {ended.status}")

    def _leave(self, progress: _Progress, status: str, ended: Ended | None = None, reason: str = "") -> None:
        del self._open[progress.came.id]
        times = progress.token_times_ns
        end_ns = None if ended is None else ended.end_ns
        finish_ns = end_ns if status == "finished" else None
        preempted_ns = progress.preempted_ns
        if progress.preempted_at_ns is not None and end_ns is not None:
            preempted_ns += end_ns - progress.preempted_at_ns
        compiled_ns = progress.compiled_ns
        if compiled_ns is None and progress.came.structured:
            compiled_ns = end_ns  # a lower bound of the time
        drafted = ("drafts", "draft_tokens", "accepted_tokens") if progress.drafts else ()
        self._recording.add_request(
            {
                **progress.request.labels,
                "replica": 0,
                "status": status,
                "reason": reason,
                "prompt_tokens": progress.came.prompt_tokens,
                "output_tokens": len(times),
                "arrival_ns": progress.came.arrival_ns,
                "queued_ns": progress.came.queued_ns,
                "scheduled_ns": progress.scheduled_ns,
                "first_token_ns": times[0] if times else None,
                "finish_ns": finish_ns,
                "prefix_hit_tokens": progress.hit,
                "preemptions": 0 if ended is None else ended.preemptions,
                "preempted_ns": preempted_ns,
                "recomputed_tokens": max(progress.recomputed, 0),
                "token_times_ns": times.tolist(),
                "end_ns": end_ns,
                "client_id": _client_id(progress.came.client_id),
                "grammar_compile_ns": None if compiled_ns is None else compiled_ns - progress.came.queued_ns,
                "steps_before_end": ended.returned_steps if ended and status in ("cancelled", "aborted") else None,
                **{name: getattr(progress, name) for name in drafted},
            }
        )


def _client_id(name: str) -> str:
    """Return the client's name of a request (X-Request-Id), without vLLM's prefix and random suffix."""
    if (served := _SERVED_NAME.fullmatch(name)) is None:
        return name
    return served["chat"] or served["completion"]


def _admit(progress: _Progress, cached: int, start_ns: int) -> None:
    if progress.scheduled_ns is None:
        progress.scheduled_ns, progress.hit = start_ns, cached
    if progress.preempted_at_ns is not None:
        progress.preempted_ns += start_ns - progress.preempted_at_ns
        progress.preempted_at_ns = None
        progress.recomputed -= cached


def _adapters(flight: Flight) -> dict[str, int] | None:
    if not flight.adapters:
        return None
    work = flight.adapter_work
    times = {"loads": work.loads, "load_ns": work.load_ns, "copies": work.copies, "copy_ns": work.copy_ns}
    return {"adapters": len(flight.adapters), "tokens": sum(flight.adapters.values()), **times}


def _by_row(flight: Flight, by_id: Mapping[int, int] | None) -> list[int | None] | None:
    return None if by_id is None else [by_id.get(id) for id in flight.ids]


def _plan(flight: Flight) -> StepPlan:
    """Return the amounts of a step. Plain decode rows, which are nearly all rows, are counted together."""
    drafts = flight.drafts
    decodes, context = len(flight.ids), sum(flight.computed)
    plan = StepPlan.from_amounts()
    if drafts or flight.tokens.count(1) < decodes:
        for id, tokens, computed in zip(flight.ids, flight.tokens, flight.computed, strict=True):
            drafted = drafts.get(id, 0)
            if tokens != 1 or drafted:
                plan.pad(Padding(1, computed - tokens, tokens, drafted))
                decodes -= 1
                context -= computed
    plan.decode_rows += decodes
    plan.decode_context += context - decodes
    plan.sampled_rows = sum(flight.samples)
    if structured := set(flight.structured):
        sampling = (id for id, samples in zip(flight.ids, flight.samples, strict=True) if samples)
        plan.masked_rows = sum(1 + drafts.get(id, 0) for id in sampling if id in structured)
    return plan
