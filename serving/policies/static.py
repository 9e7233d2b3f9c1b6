"""The `static` policy: fixed batches, the textbook baseline.

A batch is formed when nothing runs: the first waiting requests whose whole sequences, prompt and output, fit in KV
memory together. Nobody joins until the last of them has finished, so nothing is ever preempted.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from serving.deployments.config import SchedulerConfig
from serving.policies.vllm import VllmScheduler
from serving.request import Request
from serving.step_plan import StepPlan


class StaticScheduler(VllmScheduler):
    """Batches of at most `max_num_seqs`; within one, steps are formed as `vllm` forms them."""

    def __init__(self, config: SchedulerConfig, **engine: Any) -> None:
        super().__init__(config, **engine)
        self._to_admit: deque[Request] = deque()  # members of the current batch that have not been admitted yet

    def schedule(self) -> StepPlan:
        if not self.running:
            self._to_admit = self._batch()
        return super().schedule()

    def head(self) -> Request | None:
        """The next of the batch. What ended is passed over; what loads instead joins a later batch."""
        batch = self._to_admit
        while batch and (batch[0].ended or batch[0].loading or batch[0].id in self.running):
            batch.popleft()
        return batch[0] if batch else None

    def _batch(self) -> deque[Request]:
        """The requests at the head of the queue that fit together to their very ends, beside those that load."""
        free = self.pool.free - sum(self._blocks_to_come(request) for request in self.waiting if request.loading)
        loaded = self.kv_loading.ready.values() if self.kv_loading is not None else ()
        ready = [request for request in self.waiting if not request.held]
        batch: deque[Request] = deque()
        for request in (*loaded, *ready):
            free -= self._blocks_to_come(request)
            if free < 0 or len(batch) == self.config.max_num_seqs:
                break
            batch.append(request)
        return batch

    def _blocks_to_come(self, request: Request) -> int:
        """Blocks that it will take beside those it holds."""
        return self.most_held(request) - request.held
