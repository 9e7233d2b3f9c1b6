"""The `static` policy: fixed batches, the textbook baseline.

A batch is formed when nothing runs: the first waiting requests whose whole sequences, prompt and output, fit in KV
memory together. Nobody joins until the last of them has finished, so nothing is ever preempted.
"""

from __future__ import annotations

from itertools import chain

from serving.kv_blocks import blocks_for
from serving.request import Status
from serving.step_plan import StepPlan
from serving.vllm import VllmScheduler


class StaticScheduler(VllmScheduler):
    """Batches of at most `max_num_seqs`; within one, steps are formed as `vllm` forms them."""

    _to_admit = 0  # members of the current batch that have not been admitted yet

    def _schedule_waiting(self, plan: StepPlan, budget: int, threshold: int) -> None:
        if not self.running:
            self._to_admit = self._batch()
        while self._to_admit and budget > 0 and (head := self._head()):
            tokens = self._admit(plan, head, budget, threshold)
            if head.status is Status.LOADING:  # it joins a later batch
                self._to_admit -= 1
                continue
            if not tokens:  # without chunked prefill: the prompt waits for a step of its own
                break
            budget -= self._take(plan, plan.admitted[-1], tokens)
            self._to_admit -= 1

    def _batch(self) -> int:
        """How many requests at the head of the queue fit together to their very ends."""
        free = self.pool.free
        size = 0
        neither_loaded_nor_loading = (request for request in self.waiting if not request.held)
        for request in chain(self._loaded.values(), neither_loaded_nor_loading):
            free -= blocks_for(request.max_len - 1, self.config.block_size) - request.held
            if free < 0 or size == self.config.max_num_seqs:
                break
            size += 1
        return size
