"""The exact `sglang` policy: decides as SGLang 0.5.23's scheduler does, in the plain and the overlapped loop.

A step computes prompts, or else decodes; only with `enable_mixed_chunk` it does both. Prompts come first. Requests are
admitted while their tokens, and the output that running requests are expected to need, fit beside each other. If pages
run out later, requests are retracted, those with the fewest output tokens first.

This file follows `Scheduler.get_next_batch_to_run` and the processing of results. `sglang_budget.py` counts what one
step may still admit (`PrefillAdder`), `sglang_queue.py` orders the queue (`SchedulePolicy`), `serving/kv/radix_*.py`
keep the pages. `sglangside/virtual_clock.py` records SGLang's own decisions, and `tokentwin conformance` compares.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from serving.decode_set import DecodeSet
from serving.deployments.config import SchedulerConfig
from serving.errors import UserError
from serving.kv.content import Content, SegmentContent
from serving.kv.external import ExternalKv
from serving.kv.radix_pool import RadixPool
from serving.policies.residents import Residents
from serving.policies.sglang_budget import Admission, NewTokenRatio, PrefillBudget, Verdict
from serving.policies.sglang_queue import SglangQueue
from serving.request import Request, Status
from serving.step_plan import Row, StepPlan, by_admission

_RETRACT_STEPS = 20  # SGLANG_RETRACT_DECODE_STEPS: decode steps that a retraction makes room for
_RECEIVES = 1000  # weight of a step with prompts on the way to `scheduler_recv_interval`; a decode step weighs 1


class SglangScheduler(Residents):
    """SGLang's scheduler. Retracted requests join the end of its queue."""

    def __init__(self, config: SchedulerConfig, *, content: Content | None = None) -> None:
        super().__init__(config, shares_prefixes=False)
        names = (content or SegmentContent(config.block_size)) if config.enable_prefix_caching else None
        self._pages = RadixPool(config, names, named=content is not None)
        self.pool = self._pages
        self._queue = SglangQueue(config)
        self.waiting = self._queue
        self.decodes = DecodeSet(config.block_size)
        self._unsteady: dict[int, Request] = {}  # running requests outside the decode set
        self._batch: dict[int, Request] = {}  # requests that decode, in SGLang's order
        self._full = False  # True if no request can be admitted before one leaves
        self._last: list[Request] | None = None  # requests of the last plan, if it computed prompts
        self._chunked: Request | None = None  # the request whose prompt is not all planned
        self._stashed = True  # the pages of `_chunked` are in the tree
        self._in_flight: deque[StepPlan] = deque()
        # for each plan in flight: number of its rows that compute prompts, and order of its decodes, by request id
        self._made: deque[tuple[int, dict[int, int]]] = deque()
        self._prompts = 0  # the first number of the plan being made
        self._rank: dict[int, int] = {}
        self._next_rank = 0
        # (clock of the decode set, number of the plan) at the start of each run of consecutive plans with decodes
        self._ticked: deque[tuple[int, int]] = deque()
        self._planned = self._admissions = 0
        self._counter = 0  # progress towards the next look for new requests
        self._most_running = min(config.most_running, config.max_num_batched_tokens)
        self._overlaps = config.async_scheduling
        self._mixes = config.enable_mixed_chunk and config.enable_chunked_prefill
        self._recv_interval = config.scheduler_recv_interval
        self._ratio = NewTokenRatio(config.schedule_conservativeness)
        if self._mixes and config.max_num_batched_tokens <= self._most_running:
            remedy = f"must be larger than max_num_seqs {config.max_num_seqs} with enable_mixed_chunk; raise it"
            raise UserError("scheduler.max_num_batched_tokens", config.max_num_batched_tokens, remedy)

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
            request.end_len = min(request.end_len, request.max_len)
        elif room < limit:
            return f"needs {limit} output tokens; SGLang keeps one page free, so there is room for {max(room, 0)}"
        return ""

    def abort(self, id: int) -> Request | None:
        request = self.requests.get(id)
        if request is not None:
            self._end(request, Status.ABORTED, keep=request is not self._chunked)
        return request

    def _end(self, request: Request, status: Status, keep: bool = True) -> None:
        if request.decodes is not None:
            self._leave(request)
        if self.running.pop(request.id, None) is not None:
            self._unsteady.pop(request.id, None)
            if self._batch.pop(request.id, None) is not None:
                self._full = False
            if request is self._chunked:
                self._chunked = None
            if keep:
                self._pages.checkpoint(request, min(request.computed, request.known))
            self._pages.drop(request)
        else:
            self.waiting.remove(request)
        request.status = status
        del self.requests[request.id]

    # One step

    def schedule(self) -> StepPlan:
        plan = StepPlan(self._planned, self.decodes, len(self._in_flight))
        self._prompts = 0
        self._look()
        if not self.requests and not self._in_flight:
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
        self._queue.look()

    def _merge_last(self) -> None:
        """Let the requests of a step with prompts decode from now on, apart from one with more prompt to come."""
        last, self._last = self._last, None
        if last is None:
            return
        stay = [
            request
            for request in last
            if not request.ended and request.status is Status.RUNNING and request is not self._chunked
        ]
        if len(stay) < len(last) or (stay and not self._batch):
            self._full = False
        for request in stay:
            self._batch[request.id] = request
        self._order(stay)

    def _order(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._rank[request.id] = self._next_rank
            self._next_rank += 1

    # Prompts

    def _seats(self) -> int:
        """Return how many more requests can be admitted, whether they decode or have not ended yet."""
        return self._most_running - max(len(self._batch), len(self.running))

    def _prefill(self, plan: StepPlan) -> bool:
        """Plan prompts; return False if there is nothing to plan."""
        batch, chunked, waiting = self._batch, self._chunked, self._queue
        if not batch:
            self._full = False
        if chunked is None:
            if self._full or not waiting.seen:
                return False
            if self._seats() <= 0:
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
        # a chunked request has a seat, but does not decode yet
        seats = min(self._most_running - len(batch), self._most_running - len(self.running) + len(rows))
        admitted: list[Request] = []
        for request in waiting.seen:
            if budget.verdict() is Verdict.OTHER:
                break
            if len(rows) >= seats:
                self._full = True
                break
            admission = budget.admit(request, first=not rows)
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
        if not rows:
            return False
        waiting.leave(admitted)
        self._take_pages(rows)
        self._prompts = len(rows)
        for request, tokens in rows:
            self._give(plan, request, tokens)
        last = [request for request, _ in rows]
        if mixed:
            last += self._mix(plan)
        self._last, self._stashed = last, False
        return True

    def _admit(self, plan: StepPlan, request: Request, admission: Admission) -> None:
        cached = admission.node.end
        self._pages.hold(request, admission.node)
        request.count_cached(cached)
        if request.first_hit is None:
            request.first_hit = cached
        if request.preemptions:
            request.recomputed -= cached
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
        for request in requests:
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
        return sum(request.computed % page == 0 for request in requests)

    def _decode_pages(self, requests: Collection[Request]) -> None:
        if self._block_size > 1:
            self._pages.make_room(len(requests))
        for request in requests:
            self._pages.extend(request, request.computed + 1)

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
        if self._block_size > 1:
            pool.make_room(members + len(others))
        if members:
            self._tick(plan)
        for request in others:
            pool.extend(request, request.computed + 1)
            self._give(plan, request, 1)

    def _retract(self, plan: StepPlan) -> None:
        """Retract requests until the others can decode: those with the fewest output tokens, then the longest prompts.

        Raises UserError if not even one request can decode, where SGLang would abort it.
        """
        batch, pool = self._batch, self._pages
        kept = sorted(batch.values(), key=lambda request: (request.outputs, -request.prompt_len), reverse=True)
        retracted: list[Request] = []
        while len(kept) > 1 and not (retracted and pool.make_room(self._new_pages(kept))):
            request = kept.pop()
            request.recomputed += request.computed
            pool.drop(request)
            pool.make_room(-(-len(kept) * _RETRACT_STEPS // self._block_size))
            request.preempted()
            del self.running[request.id]
            del self._unsteady[request.id]
            retracted.append(request)
        if not pool.make_room(self._new_pages(kept)):
            remedy = f"is too small: SGLang aborts request {kept[0].id} here, which cannot decode alone; raise it"
            raise UserError("scheduler.num_blocks", self.config.num_blocks, remedy)
        self._full = False
        self._batch = {request.id: request for request in kept}
        self._rank = dict(self._rank)
        self._order(kept)
        self._ratio.estimate(kept)
        for request in retracted:
            self._queue.put_back(request)
        plan.preempted += tuple(retracted)

    # Rows

    def _give(self, plan: StepPlan, request: Request, tokens: int) -> None:
        start = request.computed
        samples = request.scheduled(tokens)
        if samples and not request.pools:
            request.sampled_in.append((plan.seq, 1))
        plan.add(Row(request, start, tokens, samples))

    def _launch(self, plan: StepPlan) -> None:
        self._planned += 1
        self._in_flight.append(plan)
        self._made.append((self._prompts, self._rank))
        for request, _, _, samples, _ in plan.listed:
            if samples and request.unscheduled > 0 and not request.arrived.structured:
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
        prompts, rank = self._made.popleft()
        decodes = self.decodes
        if plan.clock:  # 0 without decodes
            decodes.committed = plan.clock
        rows = plan.rows_outside_decodes()
        if not (rows or stopped):
            return []
        if plan.departed and len(rows) > 1:
            rows = sorted(rows, key=lambda row: rank.get(row.request.id, 0))
        finished = []
        for number, (request, start, tokens, samples, _) in enumerate(rows):
            if request.ended:
                continue
            if request.stale:  # retracted since: SGLang drops the token
                request.stale -= tokens
                plan.sampled_rows -= samples and not request.pools
                continue
            request.returned(tokens, samples)
            if not samples:
                continue
            if request.known == request.end_len or request.id in stopped:
                finished.append(request)
                self._end(request, Status.FINISHED)
            elif number < prompts:
                self._pages.checkpoint(request, start + tokens)
        if stopped:
            members = decodes.members
            for request in [members[id] for id in stopped if id in members and members[id].joined < plan.clock]:
                finished.append(request)
                self._end(request, Status.FINISHED)
        if len(finished) > 1:
            finished.sort(key=by_admission)
        return finished

    # Many steps at once

    def steady_steps(self) -> int:
        decodes, in_flight = self.decodes, self._in_flight
        members = len(decodes.members)
        if not members or self._unsteady or self._last is not None or len(in_flight) != self._overlaps:
            return 0
        if in_flight and in_flight[0].rows_outside_decodes():
            return 0
        if self._queue.seen and not self._full:
            return 0
        steps = decodes.steps_to_exit() - len(in_flight)
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
        last = steps == decodes.steps_to_exit()
        quiet = steps - last
        self._pages.take_for(decodes, quiet, lag=len(self._in_flight))
        decodes.skip(quiet)
        self._planned += quiet
        for plan in self._in_flight:
            plan.skip(quiet)
        self._ratio.decay(quiet)
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
