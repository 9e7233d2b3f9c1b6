"""The `vllm` policy: decides exactly as vLLM 0.33's scheduler does, plain or overlapped.

There are no phases: each step brings every request's computed tokens towards its known tokens. Running requests
come first, in order of admission; then, if nothing had to be preempted, waiting ones, strictly in order. The
recordings of vLLM's own scheduler in tests/data/oracle are the judge (`tokentwin conformance`).

Requests in steady decode are not looked at one by one: when the whole decode set gets its tokens and blocks,
the order in which it gets them cannot matter, and `DecodeSet` advances it in O(1). When it does not, the
set is dissolved and the step is planned request by request.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Collection, Iterable

from serving.config import SchedulerConfig
from serving.content import Content
from serving.decode_set import DecodeSet
from serving.errors import UserError
from serving.external_kv import ExternalKv
from serving.kv_blocks import Hit, blocks_for, kv_blocks
from serving.request import Request, Status
from serving.speculative import Acceptance
from serving.step_plan import Row, StepPlan, by_admission
from serving.waiting import FcfsQueue, OrderedQueue, WaitingQueue, by_priority
from serving.workload import WorkloadRequest

# vLLM's rules do livelock: requests of equal priority and arrival can take each other's blocks in turn, each
# starting over before it has sampled a token. This many preemptions without a token in between are taken for that.
_MOST_IN_VAIN = 1000


class VllmScheduler:
    """Continuous batching with chunked prefill, prefix caching and preemption by recomputation.

    `schedule` raises UserError when requests keep preempting one another without any of them getting on.
    """

    def __init__(
        self, config: SchedulerConfig, *, shares_prefixes: bool = True, content: Content | None = None
    ) -> None:
        self.config = config
        self.pool = kv_blocks(config, shares_prefixes, content)
        self.requests: dict[int, Request] = {}
        self.running: dict[int, Request] = {}
        self.waiting = self._queue()
        self.decodes = DecodeSet(config.block_size)
        self._others: dict[int, Request] = {}  # running, but not in the decode set
        self._in_flight: deque[StepPlan] = deque()
        self._overlaps = config.async_scheduling
        self._pipelined = False  # whether a step was ever planned behind others whose tokens it cannot foresee
        self._external: ExternalKv | None = None
        self._loaded: dict[int, Request] = {}  # waiting, with all the blocks they need
        self._plans = 0
        self._admissions = 0
        self._refused: tuple[object, ...] | None = None  # the circumstances in which the head did not fit
        self._in_vain = 0  # preemptions since a step last sampled
        # A pydantic attribute costs three plain ones.
        self._budget = config.max_num_batched_tokens
        self._most_running = config.max_num_seqs
        self._max_len = config.max_model_len
        self._long_prefill = config.long_prefill_token_threshold
        self._reserves_all = config.scheduler_reserve_full_isl
        self._chunks = config.enable_chunked_prefill
        self._forgets_withdrawn = config.forget_withdrawn
        self._block_size = config.block_size
        self._watermark = int(config.watermark * config.num_blocks)
        speculative = config.speculative
        self._drafts = speculative.num_speculative_tokens if speculative else 0  # of one request in a step
        self._lookahead = speculative.num_lookahead_tokens if speculative else 0
        self._acceptance = Acceptance(speculative) if speculative else None

    # What other policies order differently

    def _queue(self) -> WaitingQueue:
        """The order in which waiting requests are admitted."""
        return OrderedQueue(by_priority) if self.config.policy == "priority" else FcfsQueue()

    def _turns(self, requests: Iterable[Request]) -> list[Request]:
        """The order in which running requests get their tokens."""
        return sorted(requests, key=by_admission)

    def _decodes_first(self, wanting: list[tuple[Request, int]], left: int) -> bool:
        """Whether every member of the decode set has its turn before `wanting`, who share the `left` tokens."""
        return wanting[0][0].admitted > self.decodes.newest

    def _victim(self) -> Request:
        """Whom a lack of blocks costs its place."""
        if self.config.policy == "fcfs":
            return self.running[next(reversed(self.running))]
        return max(self.running.values(), key=lambda r: (r.priority, r.arrived.arrival_ns))

    def _step_budget(self) -> int:
        """Most tokens of the step about to be planned."""
        return self._budget

    # What arrives and leaves

    def add(self, arrived: WorkloadRequest, outputs: int = 0) -> Request:
        request = Request(arrived, outputs)
        request.reason = self._never_fits(request)
        if request.reason:
            request.status = Status.REJECTED
            return request
        if arrived.id in self.requests:
            raise ValueError(f"request {arrived.id} is already here")
        self.requests[arrived.id] = request
        self.waiting.add(request)
        return request

    def abort(self, id: int) -> Request | None:
        request = self.requests.get(id)
        if request is not None:
            self._end(request, Status.ABORTED)
        return request

    def _never_fits(self, request: Request) -> str:
        """Why the request could never finish, or an empty string."""
        if request.prompt_len < 1 or request.max_len == request.prompt_len:
            return "a request needs at least one prompt token and one output token"
        if request.max_len > self._max_len:
            return (
                f"{request.prompt_len} prompt + {request.max_len - request.prompt_len} output tokens "
                f"exceed max_model_len {self._max_len}"
            )
        need = blocks_for(request.max_len - 1, self._block_size)  # the last token is never computed
        if need > self.pool.total:
            return f"needs {need} KV blocks of {self._block_size} tokens; there are {self.pool.total}"
        return ""

    def _end(self, request: Request, status: Status) -> None:
        if request.decodes is not None:
            self._leave_decodes(request, self._plans - 1)
        if self.running.pop(request.id, None):
            del self._others[request.id]
        else:
            self.waiting.remove(request)
            self._loaded.pop(request.id, None)
        if self._external is None or not self._keeps(request, status):
            self.pool.release(request)
        request.status = status
        del self.requests[request.id]

    # One step

    def schedule(self) -> StepPlan:
        lag = len(self._in_flight)
        if lag and not self._overlaps and not self._pipelined:
            self._pipelined = True  # nobody decodes in every step: requests are looked at one by one from now on
            self._dissolve_decodes()
        plan = StepPlan(self._plans, self.decodes, lag)
        threshold = self._threshold()
        budget = self._schedule_running(plan, self._step_budget(), threshold)
        if self.waiting and not plan.preempted:
            self._schedule_waiting(plan, budget, threshold)
        self._close(plan)
        return plan

    def _threshold(self) -> int:
        """Most tokens of one request in this step. Alone, a request is not held back."""
        threshold = self._long_prefill
        if not threshold or len(self.running) + len(self.waiting) <= 1:
            return self._budget
        return threshold

    def _schedule_running(self, plan: StepPlan, budget: int, threshold: int) -> int:
        """Rows of the running requests; what is left of the budget."""
        rows = self._granted_together(budget, threshold)
        if rows is None:
            self._dissolve_decodes()
            return self._schedule_one_by_one(plan, budget, threshold)
        if self.decodes.members:
            budget -= self._tick(plan)
        for request, tokens in rows:
            budget -= self._take(plan, request, tokens)
        return budget

    def _granted_together(self, budget: int, threshold: int) -> list[tuple[Request, int]] | None:
        """Rows outside the decode set if the whole set can be granted too; None if order matters."""
        decodes = self.decodes
        left = budget - len(decodes.members)
        need = len(decodes.crossing())
        if not self._others:
            return [] if left >= 0 and need <= self.pool.free else None
        wanting = [
            (request, tokens)
            for request in self._turns(self._others.values())
            if (tokens := self._wanted(request, threshold))
        ]
        if left < 0:
            return None
        decodes_first = not wanting or not decodes.members or self._decodes_first(wanting, left)
        if not decodes_first and (not self.pool.counts_only or sum(tokens for _, tokens in wanting) > left):
            return None
        rows = []
        for request, tokens in wanting:
            if left <= 0:
                break
            if tokens > left:
                tokens = left
            left -= tokens
            more = self._lacking_blocks(request, tokens)
            if more > 0:  # what was loaded holds its blocks already
                need += more
            rows.append((request, tokens))
        return rows if need <= self.pool.free else None

    def _schedule_one_by_one(self, plan: StepPlan, budget: int, threshold: int) -> int:
        for request in self._turns(self.running.values()):
            if budget <= 0:
                break
            if request.id not in self.running:  # preempted for the sake of one before it
                continue
            tokens = min(self._wanted(request, threshold), budget)
            if not tokens:
                continue
            while self._lacking_blocks(request, tokens) > self.pool.free:
                victim = self._victim()
                budget += self._preempt(plan, victim)
                if victim is request:
                    break
            else:
                budget -= self._take(plan, request, tokens)
        return budget

    def _wanted(self, request: Request, threshold: int) -> int:
        """Tokens this running request could use in a step, drafts among them."""
        if request.placeholders and (not self._overlaps or request.unscheduled < 1):
            return 0  # its token is under way: the last one, or one that must be known first
        wanted = request.pending
        if request.proposed:
            wanted += min(request.proposed, request.unscheduled - 1)
        return wanted if wanted < threshold else threshold

    def _slots(self, request: Request, end: int) -> int:
        """Tokens that `request` holds KV blocks for in a step that computes its tokens up to `end`."""
        if self._lookahead and request.computed > request.cached:  # at admission nothing has been drafted
            return min(end + self._lookahead, request.max_len - 1)
        return end

    def _lacking_blocks(self, request: Request, tokens: int) -> int:
        """Blocks that `request` needs for a step with `tokens` of it, beside those it holds; negative if too many."""
        end = request.computed + tokens
        if self._lookahead:
            end = self._slots(request, end)
        return -(-end // self._block_size) - request.held

    def _preempt(self, plan: StepPlan, request: Request) -> int:
        """Back to waiting with nothing computed; the tokens it had been given in this step return."""
        row = plan.withdraw(request)
        if row:
            request.withdraw(row.tokens, row.samples, row.drafts)
            if self._forgets_withdrawn:
                self.pool.forget(request, row.start)
            if row.samples:
                request.sampled_in.pop()
        del self.running[request.id]
        del self._others[request.id]
        request.recomputed += request.computed
        request.preempted()
        self.pool.release(request, may_return=True)
        self.waiting.put_back(request)
        plan.preempted.append(request)
        return row.tokens if row else 0

    def _schedule_waiting(self, plan: StepPlan, budget: int, threshold: int) -> None:
        while budget > 0 and len(self.running) < self._most_running:
            request = self._head()
            if request is None:
                break
            circumstances = (request.id, self.pool.version, budget, threshold, not self.running)
            if circumstances == self._refused:
                break
            tokens = self._admit(plan, request, budget, threshold)
            if request.status is Status.LOADING:
                continue
            if not tokens:
                self._refused = circumstances
                break
            budget -= self._take(plan, request, tokens)

    def _head(self) -> Request | None:
        """What has been loaded, else the first waiting request of which neither step nor load is still under way."""
        for request in self._loaded.values():
            return request
        for request in self.waiting:
            if not request.stale and not request.loading:
                return request
        return None

    def _admit(self, plan: StepPlan, request: Request, budget: int, threshold: int) -> int:
        """Make the request run if it fits, and say how many tokens it gets; 0 if it must wait, or load."""
        if request.held:  # loaded: all its blocks are there
            hit, found = None, request.computed
        else:
            hit = self.pool.lookup(request)
            found = hit.blocks * self._block_size
            if self._external is not None and (loadable := self._external.matched(request, found)):
                if self._fits(request, request.known, hit):
                    self._load(self._external, request, hit, loadable)
                return 0
        tokens = min(request.known - found, threshold)
        if not self._chunks and tokens > budget:
            return 0
        tokens = min(tokens, budget)
        if hit is not None:
            if not self._fits(request, request.known if self._reserves_all else found + tokens, hit):
                return 0
            self.pool.admit(request, hit)
            request.found(found)
            if request.first_hit is None:
                request.first_hit = found
        self.waiting.remove(request)
        self._loaded.pop(request.id, None)
        if request.preemptions:
            request.recomputed -= found
        request.status = Status.RUNNING
        request.admitted = self._admissions
        self._admissions += 1
        self.running[request.id] = request
        self._others[request.id] = request
        plan.admitted.append(request)
        if self._external is not None:
            self._external.admitted(request)
        return tokens

    def _fits(self, request: Request, tokens: int, hit: Hit) -> bool:
        """Whether there are blocks for the first `tokens` tokens, beside those of `hit`."""
        need = blocks_for(tokens, self._block_size) - hit.blocks + hit.idle
        return need + (self._watermark if self.running else 0) <= self.pool.free

    def _take(self, plan: StepPlan, request: Request, tokens: int) -> int:
        """Give `request` its `tokens` in this step."""
        start = request.computed
        end = start + tokens
        drafts = max(tokens - request.pending, 0) if request.proposed else 0
        self.pool.extend(request, self._slots(request, end) if self._lookahead else end)
        samples = request.scheduled(tokens, drafts)
        self.pool.register(request, min(end, request.known))
        if samples:
            request.sampled_in.append((plan.seq, 1))
            request.proposed = self._drafts
        plan.add(Row(request, start, tokens, samples, drafts))
        return tokens

    # KV from outside

    def connect(self, external: ExternalKv) -> None:
        self._external = external

    def _load(self, external: ExternalKv, request: Request, hit: Hit, tokens: int) -> None:
        """Begin to load `tokens` tokens after those of `hit`.

        Blocks are taken for all that is known, so that what has been loaded waits for nobody's blocks: requests that
        hold some and lack others could otherwise wait for one another for ever.
        """
        found = hit.blocks * self._block_size
        self.pool.admit(request, hit)
        self.pool.extend(request, request.known)
        request.loading = found + tokens
        request.status = Status.LOADING
        external.load(request, found, tokens)

    def loaded(self, request: Request) -> None:
        if request.ended:
            self.pool.release(request)
            return
        if request.first_hit is None:
            request.first_hit = request.hashed * self._block_size
        request.found(request.loading)
        self.pool.register(request, request.loading)
        request.loading = 0
        request.status = Status.WAITING
        self._loaded[request.id] = request

    def load_failed(self, request: Request) -> None:
        self.pool.release(request)
        request.loading = 0
        if not request.ended:
            request.status = Status.WAITING

    def release(self, request: Request) -> None:
        self.pool.release(request)

    def _keeps(self, request: Request, status: Status) -> bool:
        """Whether the blocks of a request that ends are written to, or still needed elsewhere."""
        assert self._external is not None
        if status is Status.FINISHED:
            return request.held > 0 and self._external.keeps(request)
        return request.loading > 0

    # The decode set

    def _tick(self, plan: StepPlan) -> int:
        """One token for every member; those that got their last leave. The number of rows."""
        decodes = self.decodes
        rows = len(decodes.members)
        plan.add_decodes(rows, decodes.context, decodes.squares)
        self.pool.extend_decodes(decodes, plan.lag)
        leaving = decodes.tick()
        plan.clock = decodes.clock
        for request in leaving:
            self._leave_decodes(request, plan.seq)
            plan.name(request)
        return rows

    def _close(self, plan: StepPlan) -> None:
        """The plan is final: what samples in it decodes steadily from the next one on."""
        self._in_vain = 0 if plan.sampled_rows else self._in_vain + len(plan.preempted)
        if self._in_vain > _MOST_IN_VAIN:
            raise UserError(
                "scheduler.num_blocks",
                self.config.num_blocks,
                "is so few that requests preempt one another for ever; raise it, or set scheduler_reserve_full_isl",
            )
        if not (plan.decode_rows or plan.listed):
            return
        plan.clock = self.decodes.clock
        self._plans += 1
        self._in_flight.append(plan)
        if self._pipelined or self._drafts:  # a decode set counts on one token of each request a step
            return
        for request, _, _, samples, _ in plan.listed:
            if samples and request.unscheduled:
                del self._others[request.id]
                self.decodes.join(request)

    def _leave_decodes(self, request: Request, last: int) -> None:
        """Take `request`, whose last row was in plan `last`, out of the decode set.

        Plans in flight, which held its row by reference, name it from now on.
        """
        joined, ticks = request.joined, self.decodes.clock - request.joined
        self.decodes.leave(request)
        self._others[request.id] = request
        for plan in self._in_flight:
            if plan.clock > joined:
                plan.name(request)
        if ticks:
            request.sampled_in.append((last - ticks + 1, ticks))

    def _dissolve_decodes(self) -> None:
        for request in sorted(self.decodes.members.values(), key=by_admission):
            self._leave_decodes(request, self._plans - 1)

    # When a step has ended

    def commit(self, plan: StepPlan, stopped: Collection[int] = ()) -> list[Request]:
        in_flight, decodes = self._in_flight, self.decodes
        if not in_flight or in_flight.popleft() is not plan:
            raise ValueError(f"plan {plan.seq} is not the oldest in flight")
        decodes.committed = plan.clock
        if decodes.lag > len(in_flight) and decodes.members:
            self.pool.register_decodes(decodes, lag=len(in_flight))
        rows = plan.named_rows()
        if not (rows or stopped):
            return []
        ended = []
        for request, _, tokens, samples, drafts in rows:
            if request.ended:
                continue
            fresh = not request.stale
            accepted = self._verify(plan, request, drafts) if drafts else 0
            request.returned(tokens, samples, drafts, accepted)
            if fresh and plan.lag:  # with nothing in flight, all was known and registered at planning
                self.pool.register(request, request.computed - request.in_flight)
            if samples and (request.known == request.max_len or request.id in stopped):
                ended.append(request)
        if stopped:
            members = decodes.members
            ended += [members[id] for id in stopped if id in members and members[id].joined < plan.clock]
        if len(ended) > 1:
            ended.sort(key=by_admission)
        for request in ended:
            self._end(request, Status.FINISHED)
        return ended

    def _verify(self, plan: StepPlan, request: Request, drafts: int) -> int:
        """How many of its `drafts` are accepted by `plan`, which has ended."""
        assert self._acceptance is not None
        accepted = self._acceptance.accepted(request.id, request.outputs, drafts)
        request.drafts += 1
        request.draft_tokens += drafts
        request.accepted_tokens += accepted
        plan.accepted_tokens += accepted
        for _ in range(accepted):
            insort(request.sampled_in, (plan.seq, 1))  # a later step may have been planned
        return accepted

    # Many steps at once

    def steady_steps(self) -> int:
        in_flight = self._in_flight
        if self._others or len(in_flight) != self._overlaps or not self.decodes.members or self._loaded:
            return 0
        if in_flight and in_flight[0].named_rows():
            return 0
        if self._external is not None and not self.pool.counts_only:  # it is told of every block that fills
            return 0
        if self.waiting and not self._head_stays_out():
            return 0
        steps = self.decodes.steps_to_exit() - len(in_flight)
        most_blocks = len(self.decodes.members) * (steps // self._block_size + 1)
        while steps and most_blocks > self.pool.free and self.decodes.crossings(steps) > self.pool.free:
            steps //= 2
        return steps

    def _head_stays_out(self) -> bool:
        """Whether planning pure decode steps from now on would leave the queue as it is.

        Where blocks have identities, every block that fills up may be one that the head could share.
        """
        if len(self.running) >= self._most_running:
            return True
        budget = self._budget_of_waiting()
        head = self._head()
        return (
            budget <= 0
            or head is None
            or (
                self.pool.counts_only
                and (head.id, self.pool.version, budget, self._threshold(), False) == self._refused
            )
        )

    def _budget_of_waiting(self) -> int:
        """What waiting requests may have of the budget in a step in which the decode set runs."""
        return self._step_budget() - len(self.decodes.members)

    def skip(self, steps: int) -> list[Request]:
        last = steps == self.decodes.steps_to_exit()
        quiet = steps - last
        self.pool.take_for(self.decodes, quiet, lag=len(self._in_flight))
        self.decodes.skip(quiet)
        self._in_vain = 0
        self._plans += quiet
        for plan in self._in_flight:
            plan.skip(quiet)
        return self.commit(self._steady_step()) if last else []

    def _steady_step(self) -> StepPlan:
        """What `schedule` would plan, known to be the decode set and nothing else."""
        plan = StepPlan(self._plans, self.decodes, lag=0)
        self._tick(plan)
        self._close(plan)
        return plan
