"""The `prefill-first` policy: no mixed batches.

While prompts are waiting and fit, steps hold prefill only and decoding requests pause; otherwise they decode. It
shortens TTFT and stretches inter-token latency, as engines did before chunked prefill. Only a prompt that has begun
and then lacks KV blocks goes on beside decodes, because that is when `vllm` preempts.
"""

from __future__ import annotations

from serving.step_plan import StepPlan, by_admission
from serving.vllm import VllmScheduler


class PrefillFirstScheduler(VllmScheduler):
    """Prefill steps before decode steps; otherwise as `vllm`."""

    def _schedule_running(self, plan: StepPlan, budget: int, threshold: int) -> int:
        left = self._schedule_prefills(plan, budget, threshold)
        self._schedule_waiting(plan, left, threshold)
        if plan.tokens:
            self._dissolve_decodes()  # they pause, and a decode set never does
        else:
            super()._schedule_running(plan, budget, threshold)
        return 0  # waiting requests have had their turn

    def _budget_of_waiting(self) -> int:
        return self._budget  # they come first

    def _schedule_prefills(self, plan: StepPlan, budget: int, threshold: int) -> int:
        """Go on with what has been admitted and is not decoding: unfinished prompts, resumed requests."""
        for request in sorted(self._others.values(), key=by_admission):
            wanted = self._wanted(request, threshold)
            tokens = min(wanted, budget)
            decoding = request.pending == 1 and request.computed >= request.prompt_len
            if tokens and not decoding and self._lacking_blocks(request, tokens) <= self.pool.free:
                budget -= self._take(plan, request, tokens)
        return budget
