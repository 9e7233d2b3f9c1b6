"""The exact `sglang` policy: decides as SGLang 0.5.23's scheduler does, in the plain and the overlapped loop.

A step computes prompts, or else decodes; only with `enable_mixed_chunk` it does both. Prompts come first. Requests are
admitted while their tokens, and the output that running requests are expected to need, fit beside each other. If pages
run out later, requests are retracted, those with the fewest output tokens first.

This file follows `Scheduler.get_next_batch_to_run` and the processing of results. `sglang_budget.py` counts what one
step may still admit (`PrefillAdder`), `sglang_queue.py` orders the queue (`SchedulePolicy`), `sglang_preemption.py`
preempts by priority, and `serving/kv/radix_*.py` keep the pages. `lab/oracles/sglang_clock.py` records SGLang's own
decisions, and `tokentwin conformance` compares.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from tokentwin.serving.decode_set import DecodeSet
from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.kv.content import Content, SegmentContent
from tokentwin.serving.kv.external import ExternalKv
from tokentwin.serving.kv.radix_pool import RadixPool
from tokentwin.serving.policies.drafts import Drafts
from tokentwin.serving.policies.residents import Residents
from tokentwin.serving.policies.sglang_budget import Admission, NewTokenRatio, PrefillBudget, Verdict
from tokentwin.serving.policies.sglang_preemption import PriorityPreemption
from tokentwin.serving.policies.sglang_queue import SglangQueue
from tokentwin.serving.request import Request, Status
from tokentwin.serving.step_plan import Row, StepPlan, by_admission
from tokentwin.serving.workload import WorkloadRequest

_RETRACT_STEPS = 20  # SGLANG_RETRACT_DECODE_STEPS: decode steps that a retraction makes room for
_RECEIVES = 1000  # weight of a step with prompts on the way to `scheduler_recv_interval`; a decode step weighs 1


class SglangScheduler(Residents):
    """SGLang's scheduler. Retracted and preempted requests join the end of its queue.

    Attributes:
        leaving: by id, the aborted requests that are still here, and whether SGLang has looked at the abort. Then one
            that runs ends with the next token that returns, because SGLang runs it until then
    """

    def __init__(self, config: SchedulerConfig, *, content: Content | None = None) -> None:
        super().__init__(config, shares_prefixes=False)
        names = (content or SegmentContent(config.block_size)) if config.enable_prefix_caching else None
        self._pages = RadixPool(config, names, named=content is not None)
        self.pool = self._pages
        self._queue = SglangQueue(config)
        self.waiting = self._queue
        self.leaving: dict[int, bool] = {}
        self._preemption: PriorityPreemption | None = None
        if config.policy == "priority" and config.priority_scheduling_preemption_threshold is not None:
            self._preemption = PriorityPreemption(config.priority_scheduling_preemption_threshold)
        self.decodes = DecodeSet(config.block_size)
        self._unsteady: dict[int, Request] = {}  # running requests outside the decode set
        self._batch: dict[int, Request] = {}  # requests that decode, in SGLang's order
        self._full = False  # True if no request can be admitted before one leaves
        self._last: list[Request] | None = None  # requests of the last plan, if it computed prompts
        self._chunked: Request | None = None  # the request whose prompt is not all planned
        self._stashed = True  # the pages of `_chunked` are in the tree
        self._in_flight: deque[StepPlan] = deque()
        self._made: deque[int] = deque()  # for each plan in flight: number of its rows that compute prompts
        self._prompts = 0  # this number of the plan being made
        # (clock of the decode set, number of the plan) at the start of each run of consecutive plans with decodes
        self._ticked: deque[tuple[int, int]] = deque()
        self._planned = self._admissions = 0
        self._counter = 0  # progress towards the next look for new requests
        self._overlaps = config.async_scheduling
        self._mixes = config.enable_mixed_chunk and config.enable_chunked_prefill
        self._recv_interval = config.scheduler_recv_interval
        self._ratio = NewTokenRatio(config.schedule_conservativeness)
        self._drafts = 0
        self._allocated: dict[int, int] = {}  # with drafts: tokens with slots, by id, until a request first decodes
        if config.speculative is not None:  # each step verifies all drafts, even those that are not proposed
            self.drafts = Drafts(config.speculative, config.max_model_len, overlaps=True)
            self._drafts = self.drafts.tokens
        self._most_running = min(config.most_running, config.max_num_batched_tokens // (1 + self._drafts))
        if not self._most_running:
            remedy = f"must be larger than num_speculative_tokens {self._drafts}; raise it"
            raise UserError("scheduler.max_num_batched_tokens", config.max_num_batched_tokens, remedy)
        if self._mixes and config.max_num_batched_tokens <= self._most_running:
            remedy = f"must be larger than max_num_seqs {config.max_num_seqs} with enable_mixed_chunk; raise it"
            raise UserError("scheduler.max_num_batched_tokens", config.max_num_batched_tokens, remedy)
        if config.policy == "priority" and config.schedule_policy not in ("fcfs", "lof"):
            raise UserError("scheduler.schedule_policy", config.schedule_policy, "must be fcfs or lof with priorities")

    def connect(self, external: ExternalKv) -> None:
        raise UserError("policy", "sglang", "cannot load KV from outside the engine; choose another policy")

    # Requests come and go

    def _reason_to_reject(self, request: Request) -> str:
        if reason := super()._reason_to_reject(request):
            return reason
        page = self._block_size
        room = (self._pages.total - -(-request.prompt_len // page) - 1) * page - 1
        limit = request.max_len - request.prompt_len
        if room < limit and self._cuts and room > 0:
            request.max_len = request.prompt_len + room
            request.true_len = min(request.true_len, request.max_len)
        elif room < limit:
            return f"needs {limit} output tokens; SGLang keeps one page free, so there is room for {max(room, 0)}"
        return ""

    def add(self, arrived: WorkloadRequest, outputs: int = 0) -> Request:
        if arrived.id in self.leaving:  # it comes again
            self._drop_leaving(arrived.id)
        return super().add(arrived, outputs)

    def abort(self, id: int) -> Request | None:
        request = self.requests.pop(id, None)
        if request is not None:
            request.status = Status.ABORTED
            if request.decodes is not None:
                self._leave(request)
            if request in self._queue.unseen:
                self._queue.remove(request)
            else:
                self.leaving[id] = False
        return request

    def _drop_leaving(self, id: int) -> None:
        request = self.running.get(id)
        if request is None:
            self._queue.drop(id)
            self._forget(id)
        else:
            self._end(request, Status.ABORTED)
        del self.leaving[id]

    def _hang_up(self) -> None:
        """Look at new aborts: drop requests that wait or whose prompt is not all planned, and note those that run."""
        for id in [id for id, noticed in self.leaving.items() if not noticed]:
            request = self.running.get(id)
            if request is None or request is self._chunked:
                self._drop_leaving(id)
            else:
                self.leaving[id] = True

    def _end(self, request: Request, status: Status, kept: int = 0) -> None:
        """End `request`; its first `kept` tokens stay in the prefix cache."""
        if request.decodes is not None:
            self._leave(request)
        if self.running.pop(request.id, None) is not None:
            self._unsteady.pop(request.id, None)
            if self._batch.pop(request.id, None) is not None:
                self._full = False
            if request is self._chunked:
                self._chunked = None
            if kept:
                self._pages.checkpoint(request, kept)
            self._pages.drop(request)
        else:
            self.waiting.remove(request)
        self._forget(request.id)
        request.status = status
        self.requests.pop(request.id, None)

    def _forget(self, id: int) -> None:
        if self._preemption is not None:
            self._preemption.ended(id)
        self._allocated.pop(id, None)

    # One step

    def schedule(self) -> StepPlan:
        plan = StepPlan(self._planned, self.decodes, len(self._in_flight))
        self._prompts = 0
        self._look()
        if not self.running and not len(self._queue) and not self._in_flight:
            self._ratio.reset()
        chunked = self._chunked
        if chunked is not None and not self._stashed:
            self._pages.checkpoint(chunked, chunked.computed)
            self._stashed = True
        self._merge_last()
        if not self._prefill(plan) and self._batch:
            self._decode(plan)
        if plan.tokens:
            self._launch(plan)
        return plan

    def _look(self) -> None:
        """Take new requests into the queue, at once or when the steps since the last time add up."""
        if self._recv_interval > 1:
            self._counter += _RECEIVES if self._last is not None else 1
            idle = not self._in_flight and not self.running and not len(self._queue.seen)
            if self._counter < self._recv_interval and not idle:
                return
            self._counter = 0
        new = self._queue.look()
        if self._preemption is not None:
            for request in new:
                self._preemption.joins(request)
        if self.leaving:
            self._hang_up()

    def _merge_last(self) -> None:
        """Let the requests of a step with prompts decode from now on, apart from one with more prompt to come."""
        last, self._last = self._last, None
        if last is None:
            return
        stay = [request for request in last if request.id in self.running and request is not self._chunked]
        if len(stay) < len(last) or (stay and not self._batch):
            self._full = False
        for request in stay:
            self._batch[request.id] = request

    def _order(self, requests: Iterable[Request]) -> None:
        """Let `requests` run in this order, behind all others. Steps in flight still return in the old order."""
        for plan in self._in_flight:
            plan.list_departed()
        for request in requests:
            request.admitted = self._admissions
            self._admissions += 1

    # Prompts

    def _prefill(self, plan: StepPlan) -> bool:
        """Plan prompts; return False if there is nothing to plan."""
        batch, chunked, waiting = self._batch, self._chunked, self._queue
        preemption = self._preemption
        if not batch or preemption is not None:
            self._full = False
        if preemption is not None:
            preemption.stuck = False
        if chunked is None:
            if self._full or not waiting.seen:
                return False
            if max(len(batch), len(self.running)) >= self._most_running and preemption is None:
                self._full = True
                return False
        waiting.sort(self._pages)
        mixed = len(batch) if self._mixes else 0
        budget = PrefillBudget(self._pages, self.config, self._ratio.now, batch.values(), mixed)
        rows: list[tuple[Request, int]] = []
        if chunked is not None:
            tokens, ends = budget.go_on(chunked)
            rows.append((chunked, tokens))
            if ends:
                self._chunked = None
        admitted: list[Request] = []
        preempted: list[Request] = []
        for request in waiting.seen:
            if budget.verdict() is Verdict.OTHER:
                break
            # a chunked request has a seat, but does not decode yet
            if max(len(batch) + len(rows), len(self.running)) >= self._most_running:
                self._full = True
            if self._full and not self._preempt(request, budget, preempted):
                break
            admission = budget.admit(request, first=not rows)
            if preemption is not None:
                preemption.tried(request, budget.matched)
            if isinstance(admission, Admission):
                self._admit(plan, request, admission)
                admitted.append(request)
                rows.append((request, admission.tokens))
                if admission.chunked:
                    self._chunked = request
                verdict = budget.verdict()
            else:
                verdict = admission
            if verdict is not Verdict.CONTINUE:
                if verdict is Verdict.NO_TOKEN:
                    self._full = bool(rows or batch)
                break
        waiting.leave(admitted)
        self._wait_again(plan, preempted)
        if not rows:
            return False
        self._take_pages(rows)
        self._prompts = len(rows)
        for request, tokens in rows:
            self._give(plan, request, tokens)
        last = [request for request, _ in rows]
        if mixed:
            last += self._mix(plan)
        self._last, self._stashed = last, False
        return True

    def _preempt(self, request: Request, budget: PrefillBudget, preempted: list[Request]) -> bool:
        """Preempt requests for `request` and append them to `preempted`; return False if it may not preempt any."""
        preemption, batch = self._preemption, self._batch
        if preemption is None or not (victims := preemption.victims(request, batch.values(), budget)):
            return False
        self._pause_decodes()
        for victim in [running for running in batch.values() if running in victims]:
            budget.preempted(victim)
            del batch[victim.id]
            self._lose_pages(victim, len(batch))
        preempted += victims
        return True

    def _lose_pages(self, request: Request, others: int) -> None:
        """Take the pages of a request that ran beside `others` requests, and room for their next tokens."""
        request.recomputed += request.computed
        self._pages.drop(request)
        self._pages.make_room(-(-others * _RETRACT_STEPS // self._block_size))
        request.preempted()
        del self.running[request.id]
        del self._unsteady[request.id]

    def _wait_again(self, plan: StepPlan, requests: list[Request]) -> None:
        for request in requests:
            if request.id in self.leaving:
                request.status = Status.ABORTED
            if self._preemption is not None:
                self._preemption.joins(request)
            self._queue.put_back(request)
        plan.preempted += tuple(requests)

    def _admit(self, plan: StepPlan, request: Request, admission: Admission) -> None:
        cached = admission.node.end
        self._pages.hold(request, admission.node)
        request.count_cached(cached)
        if request.first_hit is None:
            request.first_hit = cached
        if request.preemptions:
            request.recomputed -= cached
        if request.id not in self.leaving:
            request.status = Status.RUNNING
        request.admitted = self._admissions
        self._admissions += 1
        self.running[request.id] = self._unsteady[request.id] = request
        plan.admitted += (request,)

    def _take_pages(self, rows: list[tuple[Request, int]]) -> None:
        """Take pages for prompts. SGLang frees room for one more page per request than it may need."""
        page, tokens = self._block_size, sum(count for _, count in rows)
        self._pages.make_room(-(-(tokens + (len(rows) * page if page > 1 else 0)) // page))
        for request, count in rows:
            self._pages.extend(request, request.computed + count)
            if self._drafts:
                self._allocated[request.id] = request.computed + count
        if self._pages.available < 0:
            remedy = "is too small: SGLang stops here, because a prompt that it admitted finds no page; raise it"
            raise UserError("scheduler.num_blocks", self.config.num_blocks, remedy)

    def _mix(self, plan: StepPlan) -> list[Request]:
        """Let decodes share the step of prompts if there are pages for all of them; return those that do."""
        self._leave_finishing()
        self._pause_decodes()
        requests = list(self._batch.values())
        if not requests or not self._pages.make_room(self._new_pages(requests)):
            return []
        self._decode_pages(requests)
        self._order(requests)
        for request in requests:
            if self._preemption is not None:
                self._preemption.tried(request, 0)
            self._give(plan, request, 1)
        self._batch = {}
        return requests

    # Decodes

    def _leave_finishing(self) -> bool:
        """Take requests out of the batch whose last token is in flight, by their limit; return whether there are any.

        Only the overlapped loop has them.
        """
        if not self._in_flight:
            return False
        leaving = [
            request
            for request in self._unsteady.values()
            if request.placeholders and request.id in self._batch and request.known + 1 >= request.max_len
        ]
        for request in leaving:
            del self._batch[request.id]
        if leaving:
            self._full = False
        return bool(leaving)

    def _new_pages(self, requests: Iterable[Request]) -> int:
        page = self._block_size
        if self._drafts:
            return sum(max(-(-self._tokens_ahead(one) // page) - one.block_count, 0) for one in requests)
        return sum(request.computed % page == 0 for request in requests)

    def _tokens_ahead(self, request: Request) -> int:
        """Return how many tokens of a request need pages before it decodes.

        With drafts, SGLang allocates two steps ahead of the tokens that it knows to be computed.
        """
        if not self._drafts:
            return request.computed + 1
        committed = request.known - (request.placeholders != 1)  # a prompt counts when it is planned
        return committed + 2 * (1 + self._drafts)

    def _make_room_ahead(self, requests: Iterable[Request]) -> None:
        """Free pages for decodes with drafts. SGLang counts the rest of a prompt's last page again."""
        page, slots, rows = self._block_size, 0, 0
        for one in requests:
            end = -(-self._tokens_ahead(one) // page) * page
            slots += max(end - self._allocated.pop(one.id, one.block_count * page), 0)
            rows += 1
        if slots and page > 1:
            self._pages.make_room(-(-slots // page) + rows)

    def _decode_pages(self, requests: Collection[Request]) -> None:
        if self._block_size > 1:
            self._pages.make_room(len(requests))
        for request in requests:
            self._pages.extend(request, self._tokens_ahead(request))

    def _decode(self, plan: StepPlan) -> None:
        finishing = self._leave_finishing()
        batch, decodes, pool = self._batch, self.decodes, self._pages
        if not batch:
            return
        members = len(decodes.members)
        others = [request for request in self._unsteady.values() if request.id in batch]
        need = len(decodes.at_block_start()) + self._new_pages(others)
        if pool.make_room(need):
            self._ratio.decay(1)
        elif finishing:
            return
        else:
            self._pause_decodes()
            self._retract(plan)
            members, others = 0, list(self._batch.values())
        if self._drafts:
            self._make_room_ahead(others)
        elif self._block_size > 1:
            pool.make_room(members + len(others))
        if members:
            self._tick(plan)
        for request in others:
            pool.extend(request, self._tokens_ahead(request))
            self._give(plan, request, 1 + self._drafts, self._drafts)

    def _retract(self, plan: StepPlan) -> None:
        """Retract requests until the others can decode: those with the fewest output tokens, then the longest prompts.

        Raises UserError if not even one request can decode, where SGLang would abort it.
        """
        batch, pool = self._batch, self._pages
        kept = sorted(batch.values(), key=lambda request: (request.outputs, -request.prompt_len), reverse=True)
        retracted: list[Request] = []
        while len(kept) > 1 and not (retracted and pool.make_room(self._new_pages(kept))):
            request = kept.pop()
            self._lose_pages(request, len(kept))
            retracted.append(request)
        if not pool.make_room(self._new_pages(kept)):
            remedy = f"is too small: SGLang aborts request {kept[0].id} here, which cannot decode alone; raise it"
            raise UserError("scheduler.num_blocks", self.config.num_blocks, remedy)
        self._full = False
        self._batch = {request.id: request for request in kept}
        self._order(kept)
        self._ratio.estimate(kept)
        self._wait_again(plan, retracted)

    # Rows

    def _give(self, plan: StepPlan, request: Request, tokens: int, drafts: int = 0) -> None:
        start = request.computed
        samples = request.scheduled(tokens, drafts)
        if samples and not request.pools:
            request.sampled_in.append((plan.seq, 1))
        plan.add(Row(request, start, tokens, samples, drafts))

    def _launch(self, plan: StepPlan) -> None:
        self._planned += 1
        self._in_flight.append(plan)
        self._made.append(self._prompts)
        for request, _, _, samples, _ in plan.listed:
            arrived = request.arrived
            steady = not (arrived.structured or arrived.changes_logits or request.ended or self._drafts)
            if samples and steady and request.true_unscheduled > 0:
                del self._unsteady[request.id]
                self.decodes.join(request)

    def _tick(self, plan: StepPlan) -> None:
        decodes = self.decodes
        self._note_tick()
        plan.add_decodes(len(decodes.members), decodes.context, decodes.squares)
        self._pages.extend_decodes(decodes, plan.lag)
        leaving = decodes.tick()
        plan.clock = decodes.clock
        for request in leaving:
            self._leave(request)
            plan.add_departed(request)

    def _note_tick(self) -> None:
        """Note that the plan being made is the first of a run, unless the plan before it had decodes, too."""
        clock, plan, ticked = self.decodes.clock, self._planned, self._ticked
        if ticked and plan - ticked[-1][1] == clock - ticked[-1][0]:
            return
        oldest = next(iter(self.decodes.members.values())).joined
        while len(ticked) > 1 and ticked[1][0] <= oldest:
            ticked.popleft()
        ticked.append((clock, plan))

    def _leave(self, request: Request) -> None:
        """Take `request` out of the decode set, and note the plans that sampled for it there."""
        joined, end = request.joined, self.decodes.clock
        sampled: list[tuple[int, int]] = []
        for clock, first in reversed(self._ticked):
            begin = max(clock, joined)
            if end > begin:
                sampled.append((first + begin - clock, end - begin))
            if clock <= joined:
                break
            end = clock
        request.sampled_in += reversed(sampled)
        self.decodes.leave(request)
        self._unsteady[request.id] = request
        for plan in self._in_flight:
            if plan.clock > joined:
                plan.add_departed(request)

    def _pause_decodes(self) -> None:
        for request in sorted(self.decodes.members.values(), key=by_admission):
            self._leave(request)

    # The end of a step

    def commit(self, plan: StepPlan, stopped: Collection[int] = ()) -> list[Request]:
        if not self._in_flight or self._in_flight.popleft() is not plan:
            raise ValueError(f"plan {plan.seq} is not the oldest in flight")
        prompts = self._made.popleft()
        decodes = self.decodes
        if plan.clock:  # 0 without decodes
            decodes.committed = plan.clock
        plan.list_departed()
        rows = plan.listed
        if not (rows or stopped):
            return []
        finished: list[Request] = []
        for number, (request, start, tokens, samples, drafts) in enumerate(rows):
            if request.ended and request.id not in self.leaving:
                continue
            if request.stale:  # retracted since: SGLang drops the token
                request.stale -= tokens
                plan.sampled_rows -= samples and not request.pools
                continue
            accepted = self.drafts.verify(plan, request, drafts) if drafts else 0  # type: ignore[union-attr]
            beyond = drafts > 0 and accepted >= request.true_len - request.known
            request.returned(tokens, samples, drafts, accepted)
            if not samples:
                continue
            if request.known == request.true_len or request.id in stopped or self.leaving.get(request.id):
                kept = request.known - 1 + int(beyond) if self._drafts else min(request.computed, request.known)
                self._finish(request, finished, kept)
            elif number < prompts:
                self._pages.checkpoint(request, start + tokens)
        if stopped:
            members = decodes.members
            for request in [members[id] for id in stopped if id in members and members[id].joined < plan.clock]:
                self._finish(request, finished, min(request.computed, request.known))
        if len(finished) > 1:
            finished.sort(key=by_admission)
        return finished

    def _finish(self, request: Request, finished: list[Request], kept: int) -> None:
        if self.leaving.pop(request.id, None) is None:
            self._end(request, Status.FINISHED, kept)
            finished.append(request)
        else:
            self._end(request, Status.ABORTED, kept)

    # Many steps at once

    def steady_steps(self) -> int:
        decodes, in_flight = self.decodes, self._in_flight
        members = len(decodes.members)
        if not members or self._unsteady or self._last is not None or len(in_flight) != self._overlaps:
            return 0
        if in_flight and in_flight[0].rows_outside_decodes():
            return 0
        if self.leaving or (self._queue.seen and not self._full):
            return 0
        steps = decodes.true_steps_to_exit() - len(in_flight)
        if self._queue.seen and self._preemption is not None:
            steps = min(steps, self._queue.quiet_passes(self._pages) if self._preemption.stuck else 0)
        if self._queue.unseen:
            if self._recv_interval == 1:
                return 0
            steps = min(steps, self._recv_interval - self._counter - 1)
        free = self._pages.free
        while steps > 0 and decodes.block_starts(steps) > free:
            steps //= 2
        return max(steps, 0)

    def skip(self, steps: int) -> list[Request]:
        decodes = self.decodes
        last = steps == decodes.true_steps_to_exit()
        quiet = steps - last
        self._pages.take_for(decodes, quiet, lag=len(self._in_flight))
        decodes.skip(quiet)
        self._planned += quiet
        for plan in self._in_flight:
            plan.skip(quiet)
        self._ratio.decay(quiet)
        if self._preemption is not None:
            self._queue.skip(quiet, self._pages)
        if self._recv_interval > 1:
            self._counter = (self._counter + quiet) % self._recv_interval
        if not last:
            return []
        return self.commit(self.schedule())

    def check(self) -> None:
        """Raise AssertionError unless the counts equal a recount (tests call this after every step)."""
        for request in self.running.values():
            if request.decodes is not None:
                request.block_count = -(-request.computed // self._block_size)
        self._pages.check(self.running.values())
