"""The `vllm` policy: decides exactly as vLLM 0.33's scheduler does, in the plain and the overlapped loop.

There are no phases: each step brings the computed tokens of every request towards its known tokens. Running requests
come first, in order of admission. If no request had to be preempted, waiting requests follow, strictly in order.
`tokentwin conformance` compares the policy with recordings of vLLM's own scheduler in tests/data/oracle.

This file holds the rules. `residents.py` holds the requests and computes the KV blocks that each needs,
`steady_decode.py` makes the rules fast, and `drafts.py` handles draft tokens. Other policies change the rules only in
the methods that are marked here (docs/policies.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, ClassVar

from mypy_extensions import mypyc_attr

from tokentwin.serving.decode_set import DecodeSet
from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.kv.blocks import NO_HIT, Hit
from tokentwin.serving.kv.content import Content
from tokentwin.serving.kv.external import KvLoading
from tokentwin.serving.policies.residents import Residents
from tokentwin.serving.policies.steady_decode import SteadyDecode
from tokentwin.serving.request import Request, Status
from tokentwin.serving.step_plan import Row, StepPlan, by_admission

if TYPE_CHECKING:
    from tokentwin.serving.policies.fair import ServiceCounters

# vLLM's rules can livelock: requests of equal priority and arrival can take each other's blocks in turn, and start over
# before they have sampled a token. This number of preemptions without a sampled token counts as a livelock.
_LIVELOCK_PREEMPTIONS = 1000


class PrefillInterval:
    """The `prefill_schedule_interval` of one scheduler: prompts get tokens in one of `steps` steps, decodes in all.

    The interval begins anew with each step that computes prompts. No prompt is held back if requests that could have
    run were left waiting by the last step that held no prompts back.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._since = steps  # number of steps since the last step that computed prompts
        self._backlog = False  # True if requests were left waiting

    @property
    def holds_prompts(self) -> bool:
        """True if the next step computes no prompts, provided that a request decodes in it."""
        return not self._backlog and self._since + 1 < self._steps

    def planned(self, plan: StepPlan, prefills: bool, held_back: bool, waiting: Iterable[Request]) -> None:
        """Record a complete `plan`, whether it computes prompts (`prefills`), and whether it held prompts back."""
        self._since = 0 if prefills else self._since + bool(plan.tokens)
        if not held_back and not plan.preempted:
            self._look_for_backlog(waiting)

    def skipped(self, steps: int, waiting: Iterable[Request]) -> None:
        """Record that `steps` pure decode steps were planned."""
        self._since += steps
        if self._backlog or self._since >= self._steps:
            self._look_for_backlog(waiting)

    def _look_for_backlog(self, waiting: Iterable[Request]) -> None:
        self._backlog = any(not request.passed_over for request in waiting)


@mypyc_attr(allow_interpreted_subclasses=True)
class VllmScheduler(Residents):
    """Continuous batching with chunked prefill, prefix caching and preemption by recomputation.

    Attributes:
        decodes_first: True if decoding requests get their tokens before unfinished prompts; otherwise the order of all
            running requests is that of admission
        unsteady: running requests outside the decode set
        draft_slots: number of budget tokens that a row takes beyond its own tokens
        adapters: LoRA adapters that take slots while a step is planned; the values do not matter
        service: counters of the tokens served to each tenant, for the policy `fair`; None under other policies

    `schedule` raises UserError when requests keep preempting one another and none of them makes progress.
    """

    decodes_first: ClassVar[bool] = False

    def __init__(
        self, config: SchedulerConfig, *, shares_prefixes: bool = True, content: Content | None = None
    ) -> None:
        super().__init__(config, shares_prefixes=shares_prefixes, content=content)
        self.unsteady: dict[int, Request] = {}
        self.decodes = DecodeSet(config.block_size)
        self.service: ServiceCounters | None = None
        varies = type(self).step_budget is not VllmScheduler.step_budget
        self._steady = SteadyDecode(self, config, budget_varies=varies)
        self._in_flight = self._steady.in_flight
        self._admissions = 0
        self._refused: tuple[object, ...] | None = None  # the circumstances under which the head did not fit
        self._preempted_in_vain = 0  # number of preemptions since a step last sampled
        # Kept as plain attributes: reading an attribute of a pydantic model takes three times as long.
        self._overlaps = self._steps_overlap = config.async_scheduling
        self._stagger = config.decode_stagger
        self._plans = 0  # number of plans made, including empty plans
        self._most_running = config.most_running
        self._long_prefill = config.long_prefill_token_threshold
        self._reserves_all = config.scheduler_reserve_full_isl
        self._chunks = config.enable_chunked_prefill
        self.draft_slots = config.speculative.draft_slots if config.speculative else 0
        self._most_scheduled = config.most_step_tokens  # draft slots do not count towards this budget
        self._budget = config.max_num_batched_tokens if self.draft_slots else self._most_scheduled
        self._longest_chunk = min(self._most_scheduled, self._long_prefill or self._most_scheduled)
        self._ends_at_own_preemption = config.self_preemption_ends_step
        self._adaptive = config.long_prefill_token_threshold_adaptive
        self._interval = PrefillInterval(steps) if (steps := config.prefill_schedule_interval) > 1 else None
        self._holds_prompts = False  # True if the step being planned computes no prompts
        self._prefills = 0  # rows of the step being planned whose requests had no token sampled in the step before
        self._pads = self._serves = False  # a decode may be admitted with drafts; the step has listed rows
        self.adapters: dict[str, int] = {}
        self._max_loras = config.max_loras or 0
        self._most_of_one = self._budget  # maximum number of tokens of one request in this step
        if self.encoding is not None and type(self).head is not VllmScheduler.head:
            self.encoding.holds_queue = True  # a policy with another head does not know which requests are passed over
        # vLLM leaves blocks in the prefix cache that a victim never computed. Policies with another victim do not.
        self._forgets_withdrawn = config.forget_withdrawn or type(self).victim is not VllmScheduler.victim

    # Methods that other policies change, besides `new_queue`

    def victim(self) -> Request:
        """Return the running request to preempt when blocks are lacking."""
        if self.config.policy == "fcfs":
            return self.running[next(reversed(self.running))]
        return max(self.running.values(), key=lambda r: (r.priority, r.arrived.arrival_ns))

    def step_budget(self) -> int:
        """Return the maximum number of tokens of the next step; it may depend only on running and waiting requests."""
        return self._budget

    def fill(self, plan: StepPlan, budget: int) -> None:
        """Give up to `budget` tokens to requests, by calling the parts of a step below."""
        left = self.serve_running(plan, budget)
        if self.waiting and not plan.preempted:
            self.admit_waiting(plan, left)

    # Requests leave

    def abort(self, id: int) -> Request | None:
        request = self.requests.get(id)
        if request is not None:
            self.end(request, Status.ABORTED)
        return request

    def end(self, request: Request, status: Status) -> None:
        """Remove `request` for good, with `status` FINISHED or ABORTED."""
        loading = self.kv_loading
        if request.decodes is not None:
            self._steady.leave(request)
        if self.running.pop(request.id, None):
            del self.unsteady[request.id]
        else:
            self.waiting.remove(request)
        if self.encoding is not None:
            self.encoding.cache.release(request)
        if loading is None or not loading.ended(request, status):
            if loading is not None and request.in_flight and self._steps_overlap:
                loading.leaving.append((self._in_flight[-1].seq, request))
            else:
                self.pool.release(request)
        request.status = status
        del self.requests[request.id]

    # One step

    def schedule(self) -> StepPlan:
        lag = len(self._in_flight)
        self._plans += 1
        if self.aligned is not None:
            self.aligned.new_step()
        if self.encoding is not None:
            self.encoding.new_step()
        if (lag and not self._overlaps) or self._stagger > 1:
            self._steady.pipeline()
            self._steps_overlap = True
        plan = StepPlan(self._steady.planned, self.decodes, lag)
        self._most_of_one = self.most_of_one() if self._long_prefill else self._budget
        self._prefills = 0
        if self._interval is not None:
            decodes = len(self.decodes.members) > 0 or any(request.decoding for request in self.unsteady.values())
            self._holds_prompts = decodes and self._interval.holds_prompts
        self.fill(plan, self.step_budget())
        if self._max_loras:
            self._hold_adapters(plan)
        if self._interval is not None:
            self._interval.planned(plan, self._prefills > 0, self._holds_prompts, self.waiting)
        if self.drafts is not None and self.drafts.varies:
            self.drafts.limit(plan)
        if self.encoding is not None and not (plan.tokens or plan.preempted or lag):
            self._must_not_wait_for_encoder()
        progress = plan.sampled_rows > 0 or any(row.samples for row in plan.listed)
        self._preempted_in_vain = 0 if progress else self._preempted_in_vain + len(plan.preempted)
        if self._preempted_in_vain > _LIVELOCK_PREEMPTIONS:
            remedy = "is too small: requests preempt one another for ever; raise it, or set scheduler_reserve_full_isl"
            raise UserError("scheduler.num_blocks", self.config.num_blocks, remedy)
        if plan.tokens:
            if self.kv_loading is not None:
                self.kv_loading.planned(plan)
            self._steady.launch(plan)
            if self._stagger > 1:
                self._stagger_decodes(plan)
        return plan

    def _must_not_wait_for_encoder(self) -> None:
        """Raise UserError if requests wait for images that no step can encode, as they would in vLLM, for ever."""
        assert self.encoding is not None
        if (self.running or self.encoding.passed_over) and self.kv_loading is None:
            remedy = "is less than an image has, and disable_chunked_mm_input forbids to split it; raise it"
            raise UserError("scheduler.long_prefill_token_threshold", self._long_prefill, remedy)

    def _hold_adapters(self, plan: StepPlan) -> None:
        """Note the adapters of the complete `plan`. Raises UserError if there are more than slots.

        That can happen with `adapter_slots_by_step`, where vLLM stops, too, and under the policy `static`.
        """
        plan.adapters = plan.count_adapters()
        if len(plan.adapters) > self._max_loras:
            remedy = f"is too small: running requests need {len(plan.adapters)} adapters in one step; raise it"
            raise UserError("max_loras", self._max_loras, remedy)

    def _stagger_decodes(self, plan: StepPlan) -> None:
        """Make requests that `plan` samples for wait until their tokens have passed all pipeline stages."""
        for request, _, _, samples, _ in plan.listed:
            if samples:
                request.eligible = self._plans + self._stagger

    def most_of_one(self) -> int:
        """Return the maximum number of tokens of one request in a step. A single request may take the whole budget."""
        requests = len(self.running) + len(self.waiting)
        if not self._long_prefill or requests <= 1:
            return self._budget
        return max(self._long_prefill, self.config.max_num_batched_tokens // requests if self._adaptive else 0)

    def room(self, plan: StepPlan, budget: int) -> int:
        """Return the maximum number of tokens of one more row of `plan`; `budget` is the rest of the budget."""
        if not self.draft_slots:
            return budget
        return min(budget - self.draft_slots, self._most_scheduled - plan.tokens)

    # Parts of a step: running requests

    def serve_running(self, plan: StepPlan, budget: int) -> int:
        """Give tokens to running requests, preempting if blocks are lacking; return the rest of the budget."""
        rows = self._steady.rows_beside(budget)
        if rows is None:
            self._steady.dissolve()
            return self._serve_one_by_one(plan, budget)
        if self.decodes.members:
            budget -= self._steady.tick(plan)
        for request, tokens in rows:
            budget -= self.give(plan, request, tokens)
        return budget

    def _serve_one_by_one(self, plan: StepPlan, budget: int) -> int:
        for request in self.turns(self.running.values()):
            room = self.room(plan, budget)
            if room <= 0:
                break
            if request.id not in self.running:  # preempted for a request before it
                continue
            tokens = min(self.wanted(request), room)
            if self.aligned is not None:
                tokens = self.chunk(request, request.computed, tokens)
            if self.encoding is not None and request.arrived.items:
                tokens = self.encoding.limit(request, request.computed, tokens)
            if not tokens:
                continue
            if self._grouped is not None:
                self._grouped.slide(request)
            while self.lacking_blocks(request, tokens) > self.pool.free:
                victim = self.victim()
                if self.kv_loading is not None and self._is_in_flight(victim, plan):
                    return budget
                budget += self._preempt(plan, victim)
                if victim is request:
                    if self._ends_at_own_preemption:
                        return budget
                    break
            else:
                budget -= self.give(plan, request, tokens)
        return budget

    @staticmethod
    def _is_in_flight(request: Request, plan: StepPlan) -> bool:
        """Return whether a step in flight before `plan` writes to the blocks of `request`."""
        return request.in_flight > sum(row.tokens for row in plan.listed if row.request is request)

    def turns(self, requests: Iterable[Request]) -> list[Request]:
        """Return the requests among `requests` that may get tokens, in the order in which they get them."""
        if self._stagger > 1:
            requests = [request for request in requests if request.eligible <= self._plans]
        return sorted(requests, key=by_decodes_first if self.decodes_first else by_admission)

    def wanted(self, request: Request) -> int:
        """Return the number of tokens that this running request could use in a step, drafts included."""
        if request.placeholders and (not self._overlaps or self._last_is_under_way(request)):
            return 0  # a token in flight must be known first, or is the request's last token
        if self._holds_prompts and not request.decoding:
            return 0
        if request.eligible > self._plans:
            return 0  # the token is still in an earlier pipeline stage
        wanted = request.pending
        if request.proposed:
            wanted = min(wanted + request.proposed, self.drafts.room(request.computed))  # type: ignore[union-attr]
        return wanted if wanted < self._most_of_one else self._most_of_one

    def chunk(self, request: Request, start: int, tokens: int) -> int:
        """Return how many of the `tokens` tokens from token `start` on a step may compute.

        The states of prefixes are cached, so a chunk of known tokens ends where a state can be cached, at the end of a
        block (vLLM's `_mamba_block_aligned_split`).
        """
        assert self.aligned is not None
        size, known = self._block_size, request.known
        prefill_end = max(request.prompt_len, known - 1)
        if start >= prefill_end:
            return tokens
        end = start + tokens
        if end < prefill_end:
            block_end = end // size * size
            if block_end > start or size <= self._longest_chunk:  # otherwise no step can compute a whole block
                end = block_end
        stops = [(start // size + 1) * size] if start % size else []
        if not (end >= prefill_end and self.aligned.can_write_within(start, end, prefill_end)):
            stops.append(
                (known - 1) // size * size
            )  # the last state that a request with the same tokens can start from
        junction = self.aligned.junction(request)
        if start < junction < end:
            stops.append(start + (junction - start) // size * size)
        return max(min([stop for stop in stops if start < stop < end], default=end) - start, 0)

    def _last_is_under_way(self, request: Request) -> bool:
        """Return whether a step in flight samples the last token of `request`, even if all its drafts are rejected."""
        return request.computed + 2 - request.placeholders >= request.max_len

    def give(self, plan: StepPlan, request: Request, tokens: int) -> int:
        """Give `request` `tokens` tokens in this step; return the budget that they take.

        The request runs, and there are free blocks for the tokens.
        """
        start = request.computed
        end = start + tokens
        drafts = max(tokens - request.pending, 0) if request.proposed else 0
        self.pool.extend(request, self.drafts.slots(end) if self._lookahead else end)  # type: ignore[union-attr]
        samples = request.scheduled(tokens, drafts)
        known = request.known - self._hash_lookahead
        self.pool.register(request, end if end < known else known)
        self._prefills += not request.decoding
        request.decoding = samples
        if self.drafts is not None:
            request.proposed = self.drafts.acceptance.proposed(request, plan.seq) if samples else 0
        if samples and not request.pools:
            request.sampled_in.append((plan.seq, 1))
            if self.service is not None:
                self.service.sampled(request, 1)
        plan.add(Row(request, start, tokens, samples, drafts))
        if self.encoding is not None and request.arrived.items:
            self.encoding.encode(plan, request)
        return tokens + self.draft_slots

    def _preempt(self, plan: StepPlan, request: Request) -> int:
        """Preempt `request`: it waits again with nothing computed. Return the budget that its row of this step took."""
        row = plan.withdraw(request)
        if self.encoding is not None:
            self.encoding.withdraw(plan, request)
        if row:
            request.withdraw(row.tokens, row.samples, row.drafts)
            if self._forgets_withdrawn:
                self.pool.forget(request, row.start)
            if row.samples and not request.pools:
                request.sampled_in.pop()
                if self.service is not None:
                    self.service.sampled(request, -1)
        del self.running[request.id]
        del self.unsteady[request.id]
        if self.kv_loading is not None:
            self.kv_loading.preempted(request)
        request.recomputed += request.computed
        request.preempted()
        self.pool.release(request, may_return=True)
        self.waiting.put_back(request)
        plan.preempted += (request,)
        return row.tokens + self.draft_slots if row else 0

    # Parts of a step: waiting requests

    def admit_waiting(self, plan: StepPlan, budget: int) -> None:
        """Admit waiting requests, in order, until one does not fit."""
        self._pads = self.drafts is not None and not self.drafts.varies and not self._prefills
        self._serves = bool(plan.listed)
        if self._max_loras:
            self.adapters = self._taken_slots(plan)
        while len(self.running) < self._most_running and (room := self.room(plan, budget)) > 0:
            request = self.head()
            if request is None:
                break
            circumstances = self._circumstances(request, budget, self._most_of_one)
            if circumstances == self._refused:
                break
            tokens = self._admit(plan, request, room)
            if request.status is Status.LOADING:
                self._refused = None
                continue
            if self.encoding is not None and request.id in self.encoding.passed_over:
                continue
            if not tokens:
                if not self.running:
                    self._must_not_be_deadlocked()
                # `head` may fit later even if no block becomes free: if a block that it could share is evicted, its
                # first chunk ends earlier.
                settled = self.pool.counts_only or (self._reserves_all and self.pool.settled(request))
                lasts = (
                    settled
                    and not request.arrived.items
                    and len(self.running) > 0
                    and not (self._pads or self._holds_prompts)
                )
                self._refused = circumstances if lasts and circumstances else None
                break
            budget -= self.give(plan, request, tokens)
            if self._max_loras and (adapter := request.arrived.adapter):
                self.adapters.setdefault(adapter, tokens)

    def head(self) -> Request | None:
        """Return the next request to admit: one whose KV has been loaded, or else the first that could run now.

        As in vLLM, a request cannot run if it has an adapter without a slot, and other adapters take all slots, or if
        the step cannot encode the image that is next in its prompt.
        """
        if self.kv_loading is not None and (loaded := self.kv_loading.head()) is not None:
            return loaded
        for request in self.waiting:
            waits = request.stale or request.compiling or request.status is Status.LOADING
            if self.encoding is not None and request.id in self.encoding.passed_over:
                waits = True
            if not waits and not (self._max_loras and self._lacks_slot(request.arrived.adapter)):
                return request
            request.passed_over = True
        return None

    def _taken_slots(self, plan: StepPlan) -> dict[str, int]:
        """Return the adapters whose slots waiting requests cannot take: those of all running requests."""
        if self.config.adapter_slots_by_step:
            return plan.count_adapters()
        taken = dict(self.decodes.adapters)
        for request in self.unsteady.values():
            if adapter := request.arrived.adapter:
                taken[adapter] = taken.get(adapter, 0) + 1
        return taken

    def _lacks_slot(self, adapter: str) -> bool:
        return bool(adapter) and len(self.adapters) >= self._max_loras and adapter not in self.adapters

    def head_was_refused(self, head: Request, budget: int) -> bool:
        """Return whether `head` did not fit when it was last considered, and nothing has changed since."""
        return self._circumstances(head, budget, self.most_of_one()) == self._refused

    def _circumstances(self, head: Request, budget: int, most_of_one: int) -> tuple[object, ...]:
        """Return all circumstances that decide whether `head` fits; empty if some of them are unknown."""
        loadable = 0
        if self.kv_loading is not None:
            if not self.pool.counts_only or self.drafts is not None:
                return ()
            loadable = self.kv_loading.external.matched(head, 0)
        return head.id, self.pool.version, budget, most_of_one, loadable

    def _must_not_be_deadlocked(self) -> None:
        """Raise UserError if no request runs and the head can never fit."""
        if self.kv_loading is not None and not self._in_flight and self.kv_loading.deadlocked:
            remedy = (
                "is too small: requests hold KV that they loaded, and wait for one another's blocks for ever; "
                "raise it, or set scheduler_reserve_full_isl"
            )
            raise UserError("scheduler.num_blocks", self.config.num_blocks, remedy)

    def waiting_budget(self) -> int:
        """Return the token budget of waiting requests in a step in which the decode set runs."""
        return self.step_budget() - len(self.decodes.members)

    def _admit(self, plan: StepPlan, request: Request, budget: int) -> int:
        """Let the request run if it fits, and return the number of tokens that it gets; 0 if it must wait or load."""
        loading, hit, loadable = self.kv_loading, None, 0
        if loading is not None and request.block_count:
            loading.take(request)
        if request.block_count:
            computed = request.computed
        else:
            reads = not request.arrived.skip_reading_prefix_cache
            hit = self.pool.lookup(request) if reads else NO_HIT
            computed = hit.blocks * self._block_size
            if loading is not None and reads and (loadable := loading.matched(request, computed)):
                if not loading.external.synchronous:
                    if self._fits_to_load(request, hit, loading, computed + loadable):
                        loading.load(request, hit, loadable)
                    return 0
                computed += loadable
        tokens = self._first_tokens(request, computed, budget)
        if self.aligned is not None:
            tokens = self.chunk(request, computed, tokens)
        if self.encoding is not None and request.arrived.items and tokens:
            tokens = self.encoding.limit(request, computed, tokens)
            if not tokens and not self.encoding.holds_queue:
                self.encoding.passed_over.add(request.id)
        if not tokens:
            return 0
        slots = computed + tokens if self.drafts is None else self.drafts.slots(computed + tokens)
        if not self._fits(request, max(request.known, slots) if self._reserves_all else slots, hit, slots):
            if self.encoding is not None:
                self.encoding.cache.release(request)
            return 0
        if hit is not None:
            self.pool.admit(request, hit)
            request.count_cached(computed)
            if request.first_hit is None:
                request.first_hit = computed - loadable
        self._run(plan, request, computed)
        if loading is not None:
            loading.admitted(request, tokens)
            if loadable:
                loading.external.load(request, computed - loadable, loadable)
        return tokens

    def _first_tokens(self, request: Request, computed: int, budget: int) -> int:
        """Return how many tokens after the first `computed` the request gets if it is admitted; 0 if it must wait."""
        tokens = request.known - computed
        if tokens > 1 and self._holds_prompts:
            return 0
        if tokens == 1 and self._pads and (self._serves or computed):
            tokens = self.drafts.padded(computed)  # type: ignore[union-attr]
            most_room = min(self._budget - self.draft_slots, self._most_scheduled)
            if tokens > most_room:  # no step has room for that; vLLM would wait forever
                tokens = 1
            elif tokens > budget:
                return 0
            request.proposed = tokens - 1
        if tokens > self._most_of_one:
            tokens = self._most_of_one
        if tokens <= budget:
            return tokens
        # no step has room for more than this, so vLLM would wait forever if it may not split the prompt
        most_room = min(self._budget - self.draft_slots, self._most_scheduled)
        return budget if self._chunks or tokens > most_room else 0

    def _run(self, plan: StepPlan, request: Request, computed: int) -> None:
        """Let the waiting `request` run from `plan` on; `computed` of its tokens were cached or loaded."""
        self.waiting.remove(request)
        if request.preemptions:
            request.recomputed -= computed
        elif self.service is not None:
            self.service.admitted(request)
        request.status = Status.RUNNING
        request.decoding = request.pending == 1
        request.passed_over = False
        request.admitted = self._admissions
        self._admissions += 1
        self.running[request.id] = request
        self.unsteady[request.id] = request
        plan.admitted += (request,)

    def _fits_to_load(self, request: Request, hit: Hit, loading: KvLoading, tokens: int) -> bool:
        """Return whether there are blocks for the first `tokens` tokens of `request`, so that they can be loaded."""
        if self._reserves_all and not self._fits(request, request.known, hit, tokens):
            return False
        return self._fits(request, tokens, hit, tokens, loading.reserved)

    # The end of a step

    def commit(self, plan: StepPlan, stopped: Collection[int] = ()) -> list[Request]:
        in_flight, decodes = self._in_flight, self.decodes
        if not in_flight or in_flight.popleft() is not plan:
            raise ValueError(f"plan {plan.seq} is not the oldest in flight")
        if self.kv_loading is not None:
            self.kv_loading.committed(plan)
        decodes.committed = plan.clock
        if decodes.lag > len(in_flight) and decodes.members:
            self.pool.register_decodes(decodes, lag=len(in_flight))
        rows = plan.rows_outside_decodes()
        if not (rows or stopped):
            return []
        ended = []
        encoding = self.encoding
        for request, _, tokens, samples, drafts in rows:
            if request.ended:
                continue
            fresh = not request.stale
            if encoding is not None and self._overlaps:
                encoding.passed(request, request.computed - request.placeholders)
            accepted = self._accepted(plan, request, drafts) if drafts else 0
            request.returned(tokens, samples, drafts, accepted)
            if encoding is not None and not self._overlaps:
                encoding.passed(request, request.computed)
            # otherwise planning has registered all full blocks
            if fresh and (plan.lag or drafts or self._hash_lookahead):
                self.pool.register(request, request.computed - request.in_flight)
            if samples and (request.known == request.true_len or request.id in stopped):
                ended.append(request)
                if encoding is not None:
                    encoding.cache.release(request)
        if stopped:
            members = decodes.members
            ended += [members[id] for id in stopped if id in members and members[id].joined < plan.clock]
        return self._finish(plan, ended) if ended else ended

    def _accepted(self, plan: StepPlan, request: Request, drafts: int) -> int:
        """Return how many of the `drafts` drafts of `request` the ended `plan` accepts."""
        accepted = self.drafts.verify(plan, request, drafts)  # type: ignore[union-attr]
        if self.service is not None:
            self.service.sampled(request, min(accepted, request.true_len - request.known - 1))
        return accepted

    def _finish(self, plan: StepPlan, requests: list[Request]) -> list[Request]:
        """Remove `requests`, which got their last token in `plan`, and return them in order of admission."""
        if len(requests) > 1:
            requests.sort(key=by_admission)
        for request in requests:
            if self.drafts is not None:  # steps in flight may have been planned for tokens beyond the last
                request.sampled_in = [(step, count) for step, count in request.sampled_in if step <= plan.seq]
            self.end(request, Status.FINISHED)
        return requests

    # Many steps at once: see `steady_decode.py`

    def pause_decodes(self) -> None:
        """Plan this step without a decode set: dissolve it, so that every running request is `unsteady`."""
        self._steady.dissolve()

    def steady_steps(self) -> int:
        return self._steady.steps()

    def skip(self, steps: int) -> list[Request]:
        self._preempted_in_vain = 0
        if self._interval is not None:
            self._interval.skipped(steps, self.waiting)
        last = self._steady.skip(steps)
        return [] if last is None else self.commit(last)


def by_decodes_first(request: Request) -> tuple[bool, int]:
    """Return a sort key: decoding requests come before unfinished prompts, and both are in order of admission."""
    return request.pending > 1, request.admitted
