"""The `prefill-first` policy: no mixed batches.

While prompts are waiting and fit, steps hold prefill only and decoding requests pause; otherwise they decode. The
policy shortens TTFT and stretches inter-token latency, as engines did before chunked prefill. Only a prompt that has
begun and then lacks KV blocks goes on beside decodes, because that is when `vllm` preempts.
"""

from __future__ import annotations

from serving.policies.vllm import VllmScheduler
from serving.request import Request
from serving.step_plan import StepPlan, by_admission


class PrefillFirstScheduler(VllmScheduler):
    """A scheduler with prefill steps before decode steps; otherwise as `vllm`."""

    def fill(self, plan: StepPlan, budget: int) -> None:
        self.admit_waiting(plan, self.go_on_with_prompts(plan, budget))
        if plan.tokens:
            self.pause_decodes()
        else:
            self.serve_running(plan, budget)

    def waiting_budget(self) -> int:
        return self.step_budget()  # waiting requests come first

    def go_on_with_prompts(self, plan: StepPlan, budget: int) -> int:
        """Go on with admitted requests that do not decode: unfinished prompts, resumed requests.

        Returns the rest of the budget.
        """
        for request in sorted(self.unsteady.values(), key=by_admission):
            tokens = min(self.wanted(request), max(self.room(plan, budget), 0))
            if tokens and not decodes(request) and self.lacking_blocks(request, tokens) <= self.pool.free:
                budget -= self.give(plan, request, tokens)
        return budget


def decodes(request: Request) -> bool:
    """Return whether all of the prompt is computed, and all tokens that a preemption lost."""
    return request.pending == 1 and request.computed >= request.prompt_len
