"""Requests in steady decode, advanced together, for one step or many steps at once.

If there are tokens and blocks for the whole decode set, the order of its members cannot matter, and `DecodeSet`
advances them in O(1). Otherwise the set is dissolved, and the scheduler's rules go through the requests one by one. The
decisions of this module must always equal those of the rules.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.kv.grouped_pool import GroupedPool
from tokentwin.serving.request import Request
from tokentwin.serving.step_plan import StepPlan, by_admission

if TYPE_CHECKING:
    from tokentwin.serving.policies.vllm import VllmScheduler


class SteadyDecode:
    """The decode set of one scheduler, and the plans that refer to it.

    Attributes:
        in_flight: plans that are not committed, the oldest first
        planned: number of non-empty plans made
    """

    def __init__(self, rules: VllmScheduler, config: SchedulerConfig, *, budget_varies: bool) -> None:
        self.in_flight: deque[StepPlan] = deque()
        self.planned = 0
        self._rules = rules
        self._pool = rules.pool
        self._decodes = rules.decodes
        self._unsteady = rules.unsteady
        self._budget_varies = budget_varies
        self._overlaps = config.async_scheduling
        self._most_running = config.most_running
        self._block_size = config.block_size
        self._reserved = config.kv_reservation != "paged"  # no request takes blocks after its admission
        # Number of blocks that a row takes when it begins a new block. Blocks that sliding windows give back in the
        # same steps do not count: another request may need blocks before these are free.
        self._at_once = self._pool.groups if isinstance(self._pool, GroupedPool) else 1
        drafting = config.speculative
        self._joins = drafting is None  # a decode set assumes one token per request and step
        self._two_budgets = (
            drafting is not None and drafting.draft_slots > 0 and config.max_num_scheduled_tokens is not None
        )

    # One step

    def pipeline(self) -> None:
        """Keep all requests out of the decode set from now on, because a pipeline has several steps in flight."""
        self._joins = False
        self.dissolve()

    def rows_beside(self, budget: int) -> list[tuple[Request, int]] | None:
        """Return the rows outside the decode set if the whole set can run beside them; None if the order matters.

        A row is a request and its number of tokens.
        """
        rules, decodes, free = self._rules, self._decodes, self._pool.free
        if self._two_budgets:
            return None
        left = budget - len(decodes.members)
        need = 0 if self._reserved else self._at_once * len(decodes.at_block_start())
        if not self._unsteady:
            return [] if left >= 0 and need <= free else None
        wanting = [
            (request, tokens) for request in rules.turns(self._unsteady.values()) if (tokens := rules.wanted(request))
        ]
        if left < 0:
            return None
        if rules.encoding is not None and any(rules.encoding.is_before_item(request) for request, _ in wanting):
            return None
        set_first = not wanting or not decodes.members or self._set_comes_first(wanting, left)
        if not set_first and (not self._pool.counts_only or sum(tokens for _, tokens in wanting) > left):
            return None
        rows = []
        slots = rules.draft_slots
        for request, tokens in wanting:
            if left <= slots:
                break
            if tokens > left - slots:
                tokens = left - slots
            if rules.aligned is not None:
                tokens = rules.chunk(request, request.computed, tokens)
            if not tokens:
                continue
            left -= tokens + slots
            more = rules.lacking_blocks(request, tokens)
            if more > 0:  # a request that has loaded holds its blocks already
                need += more
            rows.append((request, tokens))
        return rows if need <= free else None

    def _set_comes_first(self, wanting: list[tuple[Request, int]], left: int) -> bool:
        """Return whether the decode set has its turn before `wanting`, or all decodes get their tokens in any order."""
        if self._rules.decodes_first:
            return sum(request.pending == 1 for request, _ in wanting) <= left
        return wanting[0][0].admitted > self._decodes.newest

    def tick(self, plan: StepPlan) -> int:
        """Plan one token for every member, and return the number of rows. Members that got their last token leave."""
        decodes = self._decodes
        rows = len(decodes.members)
        plan.add_decodes(rows, decodes.context, decodes.squares)
        self._pool.extend_decodes(decodes, plan.lag)
        leaving = decodes.tick()
        plan.clock = decodes.clock
        for request in leaving:
            self._leave(request, plan.seq)
            plan.add_departed(request)
        return rows

    def launch(self, plan: StepPlan) -> None:
        """Launch the complete `plan`. Requests that sample in it join the decode set for the next plans."""
        plan.clock = self._decodes.clock
        self.planned += 1
        self.in_flight.append(plan)
        if not self._joins:
            return
        encoding = self._rules.encoding
        for request, _, _, samples, _ in plan.listed:
            arrived = request.arrived
            if samples and request.true_unscheduled > 0 and not (arrived.structured or arrived.changes_logits):
                if encoding is not None and encoding.cache.refers(request):
                    continue
                del self._unsteady[request.id]
                self._decodes.join(request)

    # Leaving the set

    def leave(self, request: Request) -> None:
        """Take `request` out of the set. Plans in flight that have a row of it list that row from now on."""
        self._leave(request, self.planned - 1)

    def _leave(self, request: Request, last: int) -> None:
        """Take `request` out of the set; its last row is in plan `last`."""
        joined, ticks = request.joined, self._decodes.clock - request.joined
        self._decodes.leave(request)
        self._unsteady[request.id] = request
        for plan in self.in_flight:
            if plan.clock > joined:
                plan.add_departed(request)
        if ticks:
            request.sampled_in.append((last - ticks + 1, ticks))

    def dissolve(self) -> None:
        """Take all members out of the set."""
        for request in sorted(self._decodes.members.values(), key=by_admission):
            self._leave(request, self.planned - 1)

    # Many steps at once

    def steps(self) -> int:
        """Return the number of steady steps that will follow; see `Scheduler.steady_steps`."""
        rules, decodes, in_flight, pool = self._rules, self._decodes, self.in_flight, self._pool
        if self._unsteady or len(in_flight) != self._overlaps or not decodes.members:
            return 0
        if self._budget_varies and len(decodes.members) > rules.step_budget():
            return 0
        if in_flight and in_flight[0].rows_outside_decodes():
            return 0
        loading = rules.kv_loading
        # step by step, because `loading` must know of each full block
        if loading is not None and (loading.leaving or not pool.counts_only):
            return 0
        steps = decodes.true_steps_to_exit() - len(in_flight)
        if rules.waiting and len(rules.running) < self._most_running:
            steps = self._steps_without_admission(steps)
        blocks = 0 if self._reserved else self._at_once
        most_blocks = blocks * len(decodes.members) * (steps // self._block_size + 1)
        while steps and most_blocks > pool.free and blocks * decodes.block_starts(steps) > pool.free:
            steps //= 2
        return steps

    def _steps_without_admission(self, steps: int) -> int:
        """Return how many of `steps` pure decode steps admit no request, although another request may run.

        If decodes register the blocks that they fill, the answer is 0: the head might share any of these blocks.
        """
        rules = self._rules
        rules.adapters = self._decodes.adapters
        if rules.encoding is not None:
            rules.encoding.passed_over.clear()
        budget, head = rules.waiting_budget(), rules.head()
        if budget <= 0 or head is None:
            return steps
        if not self._pool.defers or not rules.head_was_refused(head, budget):
            return 0
        return rules.waiting.steps_at_head(head, steps)

    def skip(self, steps: int) -> StepPlan | None:
        """Plan and commit `steps` steady steps at once.

        If the last step gives a member its last token, it is only planned, and returned for the caller to commit.
        Otherwise None is returned.
        """
        decodes = self._decodes
        last = steps == decodes.true_steps_to_exit()
        quiet = steps - last
        self._pool.take_for(decodes, quiet, lag=len(self.in_flight))
        decodes.skip(quiet)
        self.planned += quiet
        for plan in self.in_flight:
            plan.skip(quiet)
        if not last:
            return None
        plan = StepPlan(self.planned, decodes, lag=0)
        self.tick(plan)
        self.launch(plan)
        return plan
