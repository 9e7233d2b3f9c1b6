"""The `static` policy: fixed batches, the textbook baseline.

A batch begins when nothing runs and the waiting requests fill it: up to `max_num_seqs`, and to the KV memory for their
prompts and outputs. A smaller batch begins after `static_timeout_ms`. No request joins a batch later, and none is ever
preempted. The rows of a batch are padded, in the engine and the simulator: every prompt to the longest prompt, and
every slot whose request has ended keeps a row, as in a tensor of one shape. Attention reads each row's own KV.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.policies.prefill_first import PrefillFirstScheduler, decodes
from tokentwin.serving.request import Request, Status
from tokentwin.serving.step_plan import Padding, StepPlan

_MS = 1_000_000


class StaticScheduler(PrefillFirstScheduler):
    """A scheduler of padded batches of at most `max_num_seqs` requests: first all prompts, then all outputs.

    Attributes:
        hold_ns: how long a batch that is not full waits for more requests, in ns; 0 if no batch waits
    """

    def __init__(self, config: SchedulerConfig, **engine: Any) -> None:
        super().__init__(config, **engine)
        self._to_admit: deque[Request] = deque()  # members of the current batch that have not been admitted yet
        self._timeout_ns = round(config.static_timeout_ms * _MS)
        self._is_due = False  # True if the next batch begins even if it is not full
        self.hold_ns = 0
        self._begin()

    def _begin(self) -> None:
        self._slots = 0
        self._prompts: dict[int, tuple[int, int]] = {}  # by id: (end of its prompt, tokens computed of it)
        self._to_pad: deque[tuple[int, int]] | None = None  # (start, missing tokens), set when prompts are computed
        self._decodes = False  # True once prompts and their padding are computed
        self._length = 0  # padded length of every row, in tokens

    def hold_no_longer(self) -> None:
        """Let the next batch begin with the requests that wait now."""
        self._is_due = True

    def schedule(self) -> StepPlan:
        if not self.running:
            self._begin()
            self._to_admit = self._batch()
            self.hold_ns = 0 if self._is_due or self._is_full else self._timeout_ns
            if self.hold_ns:
                self._to_admit.clear()
        plan = super().schedule()
        if plan.admitted:
            self._is_due = False
            self._slots += len(plan.admitted)
        return plan

    @property
    def _is_full(self) -> bool:
        batch = self._to_admit
        return not batch or len(batch) == self._most_running or len(batch) < len(self.waiting)

    def head(self) -> Request | None:
        """Return the next request of the batch that still waits. A request that loads KV joins a later batch."""
        batch = self._to_admit
        while batch and (batch[0].ended or batch[0].status is not Status.WAITING):
            batch.popleft()
        return batch[0] if batch else None

    def fill(self, plan: StepPlan, budget: int) -> None:
        if not self._decodes:
            self._compute_prompts(plan, budget)
            if plan.tokens:
                self.pause_decodes()
                return
            self._decodes = True
        left = self.serve_running(plan, budget)
        if plan.decode_rows:
            drafts = max((row.drafts for row in plan.listed), default=0) if plan.draft_tokens else 0
            rows = min(self._ended, left // (1 + drafts))
            start = min(self._length, self.config.max_model_len - 1 - drafts)
            if rows > 0:
                plan.pad(Padding(rows, start, 1 + drafts, drafts))
            self._length += 1

    @property
    def _ended(self) -> int:
        """The number of slots of the batch whose requests have ended."""
        return self._slots - len(self.running)

    def _compute_prompts(self, plan: StepPlan, budget: int) -> None:
        """Compute the rest of the prompts, then the padding to the longest prompt."""
        self.admit_waiting(plan, self.go_on_with_prompts(plan, budget))
        for request, start, tokens, *_ in plan.listed:
            _, before = self._prompts.get(request.id, (0, 0))
            self._prompts[request.id] = start + tokens, before + tokens
        if self.head() is not None or not all(map(decodes, self.unsteady.values())):
            return
        if self._to_pad is None:
            most, ends = max((tokens for _, tokens in self._prompts.values()), default=0), self.config.max_model_len
            self._to_pad = deque((end, min(most - tokens, ends - end)) for end, tokens in self._prompts.values())
            self._length = max((sum(lacking) for lacking in self._to_pad), default=0)
        rows, budget = self._most_running - len(plan.listed), budget - plan.tokens
        while self._to_pad and rows > 0 and budget > 0:
            start, lacking = self._to_pad.popleft()
            tokens = min(lacking, budget)
            if tokens:
                plan.pad(Padding(1, start, tokens))
                rows, budget = rows - 1, budget - tokens
            if tokens < lacking:
                self._to_pad.appendleft((start + tokens, lacking - tokens))

    def steady_steps(self) -> int:
        return super().steady_steps() if self._decodes and not self._ended else 0

    def skip(self, steps: int) -> list[Request]:
        self._length += steps
        return super().skip(steps)

    def _batch(self) -> deque[Request]:
        """Return the requests at the head of the queue that have KV memory to their ends, beside requests that load."""
        loads = [request for request in self.waiting if request.status is Status.LOADING]
        free = self.pool.free - sum(self._blocks_to_come(request) for request in loads)
        waiting = [r for r in self.waiting if r.status is Status.WAITING and not r.compiling]
        batch: deque[Request] = deque()
        for request in sorted(waiting, key=lambda request: not request.block_count):
            free -= self._blocks_to_come(request)
            if free < 0 or len(batch) == self._most_running:
                break
            batch.append(request)
        return batch

    def _blocks_to_come(self, request: Request) -> int:
        """Return how many blocks `request` will need beyond the blocks that it holds."""
        return self.most_held(request) - request.block_count
