"""The actions of a vLLM scheduler as events, which contain no tokens.

This code runs in the engine's loop between two steps, so it only copies numbers; another thread makes a recording from
them (`recorded_run`). Nothing of vLLM is imported; vLLM's objects are read by their attributes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from operator import attrgetter, not_
from time import perf_counter_ns
from typing import Any, NamedTuple

from tokentwin.serving.workload import Item

# Loops over the rows of a step run in C.
_COMPUTED, _IS_CHUNK = attrgetter("num_computed_tokens"), attrgetter("is_prefill_chunk")
_REQUEST_ID, _NEW_TOKENS = attrgetter("request_id"), attrgetter("new_token_ids")
_FINISH_REASON = attrgetter("finish_reason")
_WAITS_FOR_GRAMMAR = "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"


class Arrived(NamedTuple):
    """A request that the scheduler has received; times are nanoseconds from the start of the recording.

    Attributes:
        limit: maximum number of tokens that it may generate; 0 for a pooling request
        keys: hashes of the full blocks of its prompt, each of which includes all tokens before the block
    """

    id: int
    client_id: str
    arrival_ns: int
    queued_ns: int
    prompt_tokens: int
    limit: int
    priority: int
    structured: bool
    skips_cache: bool
    keys: tuple[Any, ...]
    tenant: str = ""
    slo_class: str = ""
    adapter: str = ""
    items: tuple[Item, ...] = ()
    changes_logits: bool = False
    scores_prompt: bool = False


class AdapterWork(NamedTuple):
    """The LoRA adapters that were loaded from disk and copied into slots before a step, with the times of both.

    Attributes:
        thread_ns: CPU time of the thread in both
    """

    loads: int = 0
    load_ns: int = 0
    copies: int = 0
    copy_ns: int = 0
    thread_ns: int = 0

    @property
    def took_ns(self) -> int:
        """The time of both together."""
        return self.load_ns + self.copy_ns


NO_WORK = AdapterWork()


class Ended(NamedTuple):
    """A request that has ended with vLLM's `status`; `keys` are the hashes of its prompt and answer.

    Attributes:
        returned_steps: number of steps that the engine had returned by then
    """

    id: int
    status: str
    end_ns: int
    tokens: int
    preemptions: int
    keys: tuple[Any, ...]
    returned_steps: int


class Flight:
    """A step: its plan, and its results after it has returned. Lists are by row, in running order.

    computed   number of tokens computed by the end of this step
    samples    True if the row gets output tokens
    drafts     numbers of draft tokens by request id, for rows that have any
    structured ids of the requests that follow a grammar
    admitted   ids of admitted requests, with the number of tokens reused from the prefix cache
    preempted  ids of preempted requests, with the number of tokens that were computed
    compiled   ids of requests that no longer wait for their grammars
    got        ids of requests with output to clients; -1 for a request that had ended
    counts     number of output tokens of each request in `got`
    accepted   numbers of accepted tokens of `drafts`, by request id
    proposed   numbers of draft tokens that the next step can verify, by request id
    stopped    ids of requests that ended before their maximum number of tokens
    adapters   numbers of tokens by LoRA adapter
    adapter_work   loads and copies of adapters in this step; none if they are not timed
    """

    __slots__ = (
        "accepted", "adapter_work", "adapters", "admitted", "compiled", "computed", "counts", "drafts", "end_ns", "got",
        "ids", "in_flight",
        "plan_ns", "planned_ns", "preempted", "proposed", "running", "samples", "speed", "stopped", "structured",
        "thread_ns", "tokens", "used_blocks", "waiting",
    )  # fmt: skip

    def __init__(self) -> None:
        self.plan_ns = self.planned_ns = self.end_ns = self.in_flight = 0
        self.running = self.waiting = self.used_blocks = 0
        self.thread_ns: int | None = None
        self.speed: float | None = None
        self.adapters: dict[str, int] = {}
        self.adapter_work = NO_WORK
        self.ids: list[int] = []
        self.tokens: list[int] = []
        self.computed: list[int] = []
        self.samples: list[bool] = []
        self.drafts: dict[int, int] = {}
        self.structured: list[int] = []
        self.admitted: list[tuple[int, int]] = []
        self.preempted: list[tuple[int, int]] = []
        self.compiled: list[int] = []
        self.got: list[int] = []
        self.counts: list[int] = []
        self.stopped: list[int] = []
        self.accepted: dict[int, int] | None = None
        self.proposed: dict[int, int] | None = None


Event = Arrived | Ended | Flight


def _labels(request: Any) -> tuple[str, str]:
    """Return tenant and SLO class, which a client states in `vllm_xargs` (`SamplingParams.extra_args`)."""
    stated = getattr(getattr(request, "sampling_params", None), "extra_args", None) or {}
    return str(stated.get("tenant", "")), str(stated.get("slo_class", ""))


def _adapter(request: Any) -> str:
    """Return the name of the LoRA adapter of a request; empty for the base model."""
    adapter = getattr(request, "lora_request", None)
    return "" if adapter is None else str(adapter.lora_name)


def _pools(request: Any) -> bool:
    """Return whether a request wants an embedding or a score, and no tokens."""
    return getattr(request, "pooling_params", None) is not None


def _items(request: Any) -> tuple[Item, ...]:
    """Return the images, videos and audio of a request; a hash of its content names each."""
    return tuple(
        Item(one.mm_position.offset, one.mm_position.length, str(one.identifier), one.modality)
        for one in getattr(request, "mm_features", None) or ()
    )


def _changes_logits(request: Any) -> bool:
    """Return whether a request has penalties, a bias or other rules for all of its tokens."""
    stated = getattr(request, "sampling_params", None)
    if stated is None:
        return False
    names = ("presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "allowed_token_ids", "min_p")
    return getattr(stated, "repetition_penalty", 1.0) != 1.0 or any(getattr(stated, name, None) for name in names)


class NotRecorded(Exception):
    """An event that a recording cannot represent."""


class EngineEvents:
    """An observer of one scheduler, which passes its events to `put` in order.

    Attributes:
        max_model_len: maximum number of tokens of a request
        block_size: number of tokens of a block with one hash in `block_hashes`
        drafts: True if the engine has speculative decoding
        adapters: True if the engine has LoRA adapters
        overlapped: True if a step is planned before its drafts are known, for the maximum number of them
        numbered: True if the names of requests begin with their numbers; otherwise requests are numbered by arrival
        times_thread: True if this thread computes the steps, so that its CPU time is that of the steps

    Events are passed on when they are complete: a step when it has returned and, with speculative decoding, the next
        drafts are proposed. Times are `now()` minus `started_ns`; `started_s` is the start on the clock of arrivals.
    """

    def __init__(
        self,
        put: Callable[[Event], None],
        *,
        max_model_len: int,
        drafts: bool,
        adapters: bool = False,
        overlapped: bool,
        times_thread: bool,
        started_ns: int,
        started_s: float,
        numbered: bool = False,
        now: Callable[[], int] = perf_counter_ns,
    ) -> None:
        self.due_ns: dict[int, int] = {}  # known due times of requests that have not arrived
        self._look: Callable[[], float | None] | None = None
        self._speed: float | None = None
        self._adapter_work: Callable[[], AdapterWork] | None = None
        self._put = put
        self._max_model_len = max_model_len
        self._adapters = adapters
        self._pools = False  # True from the first pooling request on
        self._drafts_late = drafts and not overlapped
        self._drafts_early = drafts and overlapped
        self._thread_time: Callable[[], int] | None = time.thread_time_ns if times_thread else None
        self._started_ns = started_ns
        self._started_s = started_s
        self._now = now
        self._ids: dict[str, int] = {}
        self._requests: dict[int, Any] = {}
        self._numbered = numbered
        self._next_id = 0
        self._compiling: dict[str, Any] = {}
        self._preempted: list[tuple[int, int]] = []
        self._flights: deque[tuple[Any, Flight | None]] = deque()
        self._in_flight = 0
        self._returned = 0
        self._unsettled: list[Event] = []  # a step with unknown next drafts, and the events after it
        self._thread_at_plan: deque[int] = deque()
        self._thread_at_end = 0
        self._end_ns = 0

    def watch_speed(self, look: Callable[[], float | None]) -> None:
        """Call `look`, which returns the speed of the machine, between steps from now on."""
        self._look, self._speed = look, look()

    def watch_adapters(self, taken: Callable[[], AdapterWork]) -> None:
        """Call `taken`, which returns the loads and copies of adapters since its last call, after each step."""
        self._adapter_work = taken

    def now(self) -> int:
        """Return nanoseconds from the start of the recording."""
        return self._now() - self._started_ns

    def arrived(self, request: Any) -> None:
        """Note that the scheduler has received `request`."""
        if request.request_id in self._ids:
            raise NotRecorded("a request goes on with new input: streaming sessions are not recorded")
        self.settle()
        id = int(request.request_id.split("-")[0]) if self._numbered else self._next_id
        self._next_id += 1
        self._ids[request.request_id] = id
        self._requests[id] = request
        queued_ns = self.now()
        arrival_ns = min(max(round((request.arrival_time - self._started_s) * 1e9), 0), queued_ns)
        arrival_ns = min(self.due_ns.pop(id, arrival_ns), queued_ns)
        structured = bool(request.use_structured_output)
        if structured:
            self._compiling[request.request_id] = request
        self._pools = self._pools or _pools(request)
        self._put(
            Arrived(
                id,
                request.request_id,
                arrival_ns,
                queued_ns,
                request.num_prompt_tokens,
                self._limit(request),
                request.priority,
                structured,
                bool(request.skip_reading_prefix_cache),
                tuple(request.block_hashes),
                *_labels(request),
                _adapter(request),
                _items(request),
                _changes_logits(request),
                getattr(getattr(request, "sampling_params", None), "prompt_logprobs", None) is not None,
            )
        )

    def _limit(self, request: Any) -> int:
        """Return the maximum number of tokens that `request` may generate."""
        if _pools(request):
            return 0
        most: int = min(request.max_tokens, self._max_model_len - request.num_prompt_tokens)
        return max(most, 1)

    def preempting(self, request: Any) -> None:
        """Note that the scheduler is about to preempt `request` while it plans a step."""
        self._preempted.append((self._ids[request.request_id], request.num_computed_tokens))

    def planned(self, scheduler: Any, output: Any, plan_ns: int) -> None:
        """Note that `scheduler` began to plan at `plan_ns`, and planned `output`."""
        self.settle()
        preempted, self._preempted = self._preempted, []
        tokens: dict[str, int] = output.num_scheduled_tokens
        if not tokens:
            self._flights.append((output, None))
            return
        flight = Flight()
        flight.plan_ns = plan_ns
        flight.speed = self._speed
        flight.planned_ns = self.now()
        ids, requests = self._ids, scheduler.requests
        rows = list(map(requests.__getitem__, tokens))
        flight.ids = list(map(ids.__getitem__, tokens))
        flight.tokens = list(tokens.values())
        flight.computed = list(map(_COMPUTED, rows))
        flight.samples = list(map(not_, map(_IS_CHUNK, rows)))
        if self._pools:
            samples = zip(flight.samples, rows, strict=True)
            flight.samples = [last and not _pools(request) for last, request in samples]
        if self._adapters:
            for request, count in zip(rows, flight.tokens, strict=True):
                if name := _adapter(request):
                    flight.adapters[name] = flight.adapters.get(name, 0) + count
        if drafted := output.scheduled_spec_decode_tokens:
            flight.drafts = {ids[name]: len(drafts) for name, drafts in drafted.items()}
        if output.has_structured_output_requests:
            flight.structured = [ids[request.request_id] for request in rows if request.use_structured_output]
        flight.admitted = [(ids[new.req_id], new.num_computed_tokens) for new in output.scheduled_new_reqs]
        again = output.scheduled_cached_reqs
        if again.resumed_req_ids:
            resumed = zip(again.req_ids, again.num_computed_tokens, strict=True)
            flight.admitted += [(ids[name], count) for name, count in resumed if name in again.resumed_req_ids]
        flight.preempted = preempted
        if self._compiling:
            self._note_compiled(flight)
        flight.running, flight.waiting = scheduler.get_request_counts()
        pool = scheduler.kv_cache_manager.block_pool
        flight.used_blocks = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        if self._drafts_early:
            flight.proposed = {
                ids[request.request_id]: len(request.spec_token_ids) for request in rows if not request.is_prefill_chunk
            }
        flight.in_flight = self._in_flight
        self._in_flight += 1
        if self._thread_time is not None:
            self._thread_at_plan.append(self._thread_time())
        self._flights.append((output, flight))

    def _note_compiled(self, flight: Flight) -> None:
        for name, request in list(self._compiling.items()):
            if request.status.name != _WAITS_FOR_GRAMMAR:
                del self._compiling[name]
                flight.compiled.append(self._ids[name])

    def returning(self, output: Any, result: Any) -> Flight | None:
        """Note the model's `result` of the plan `output`; return the step, or None if the plan ran nothing."""
        flight = None
        while self._flights:
            planned, flight = self._flights.popleft()
            if planned is output:
                break
        if flight is None:
            return None
        flight.end_ns = self.now()
        if self._thread_time is not None:
            now, at_plan = self._thread_time(), self._thread_at_plan.popleft()
            flight.thread_ns = now - (at_plan if flight.planned_ns >= self._end_ns else self._thread_at_end)
            self._thread_at_end = now
        self._end_ns = flight.end_ns
        if self._adapter_work is not None:
            flight.adapter_work = self._adapter_work()
        self._in_flight -= 1
        self._returned += 1
        if flight.drafts:
            sampled, at, ids = result.sampled_token_ids, result.req_id_to_index, self._ids
            flight.accepted = {
                ids[name]: max(len(sampled[at[name]]) - 1, 0)
                for name in output.scheduled_spec_decode_tokens
                if name in at and name in ids
            }
        return flight

    def returned(self, flight: Flight, outputs: Iterable[Any]) -> None:
        """Note that the scheduler has processed the step `flight` from `returning`, and sends `outputs` to clients."""
        ids, ended = self._ids, []
        for to_client in outputs:
            sent = to_client.outputs
            flight.got += [ids.get(name, -1) for name in map(_REQUEST_ID, sent)]
            flight.counts += map(len, map(_NEW_TOKENS, sent))
            reasons = list(map(_FINISH_REASON, sent))
            if reasons.count(None) < len(reasons):
                ended += [one.request_id for one in sent if one.finish_reason is not None and one.request_id in ids]
        for name in ended:
            request = self._requests[ids[name]]
            if request.num_output_tokens < self._limit(request):
                flight.stopped.append(ids[name])
        if self._drafts_late:
            self._unsettled.append(flight)
        else:
            self._put(flight)
        self._leave(ended, flight.end_ns)
        self.proposing()
        if self._look is not None:
            self._speed = self._look()

    def proposing(self) -> None:
        """Note the drafts proposed by the step that returned last."""
        if self._unsettled and isinstance(flight := self._unsettled[0], Flight):
            open_ = self._requests
            flight.proposed = {
                id: len(open_[id].spec_token_ids)
                for id, count in zip(flight.got, flight.counts, strict=True)
                if count and id in open_
            }

    def settle(self) -> None:
        """Pass on the waiting events, which are now complete."""
        if self._unsettled:
            events, self._unsettled = self._unsettled, []
            for event in events:
                self._put(event)

    def leaving(self, names: str | Iterable[str] | None) -> list[str]:
        """Return the requests among `names` that have not ended; None stands for all requests."""
        if names is None:
            return list(self._ids)
        return [name for name in dict.fromkeys([names] if isinstance(names, str) else names) if name in self._ids]

    def left(self, names: Iterable[str]) -> None:
        """Note that the requests returned by `leaving` have been aborted from outside the scheduler."""
        self._leave(names, self.now())

    def _leave(self, names: Iterable[str], end_ns: int) -> None:
        for name in names:
            id = self._ids.pop(name)
            request = self._requests.pop(id)
            if not request.is_finished():
                raise NotRecorded("an answer waits for more input: streaming sessions are not recorded")
            self._compiling.pop(name, None)
            status, tokens = request.status.name, request.num_tokens
            ended = Ended(
                id, status, end_ns, tokens, request.num_preemptions, tuple(request.block_hashes), self._returned
            )
            if self._unsettled:
                self._unsettled.append(ended)
            else:
                self._put(ended)
