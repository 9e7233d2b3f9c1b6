"""The `static` policy: fixed batches, the textbook baseline.

A batch is formed when nothing runs: the first waiting requests whose whole sequences, prompt and output, fit in KV
memory together. Nobody joins until the last of them has finished, so nothing is ever preempted.
"""

from __future__ import annotations

from collections import deque

from serving.config import SchedulerConfig
from serving.content import Content
from serving.kv_blocks import blocks_for
from serving.request import Request, Status
from serving.step_plan import StepPlan
from serving.vllm import VllmScheduler


class StaticScheduler(VllmScheduler):
    """Batches of at most `max_num_seqs`; within one, steps are formed as `vllm` forms them."""

    def __init__(
        self, config: SchedulerConfig, *, shares_prefixes: bool = True, content: Content | None = None
    ) -> None:
        super().__init__(config, shares_prefixes=shares_prefixes, content=content)
        self._to_admit: deque[Request] = deque()  # members of the current batch that have not been admitted yet

    def _schedule_waiting(self, plan: StepPlan, budget: int, threshold: int) -> None:
        if not self.running:
            self._to_admit = self._batch()
        while self._to_admit and budget > 0:
            request = self._to_admit[0]
            if not request.ended:
                tokens = self._admit(plan, request, budget, threshold)
                if request.status is Status.WAITING:  # without chunked prefill: the prompt needs a step of its own
                    break
                if tokens:  # what loads instead joins a later batch
                    budget -= self._take(plan, request, tokens)
            self._to_admit.popleft()

    def _batch(self) -> deque[Request]:
        """The requests at the head of the queue that fit together to their very ends, beside those that load."""
        free = self.pool.free - sum(self._blocks_to_come(request) for request in self.waiting if request.loading)
        ready = [request for request in self.waiting if not request.held]
        batch: deque[Request] = deque()
        for request in (*self._loaded.values(), *ready):
            free -= self._blocks_to_come(request)
            if free < 0 or len(batch) == self.config.max_num_seqs:
                break
            batch.append(request)
        return batch

    def _blocks_to_come(self, request: Request) -> int:
        """Blocks that it will take beside those it holds."""
        return blocks_for(request.max_len - 1, self.config.block_size) - request.held
