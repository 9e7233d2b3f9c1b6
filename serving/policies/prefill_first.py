"""The `prefill-first` policy: no mixed batches.

While prompts wait and fit, steps contain only prefill, and decoding requests pause. Otherwise steps decode. This
shortens TTFT and lengthens inter-token latency, as in engines before chunked prefill. Only a prompt that has begun and
then lacks KV blocks continues in a step with decodes, because there the rules of `vllm` preempt requests for it.
"""

from __future__ import annotations

from tokentwin.serving.policies.vllm import VllmScheduler
from tokentwin.serving.request import Request
from tokentwin.serving.step_plan import StepPlan, by_admission


class PrefillFirstScheduler(VllmScheduler):
    """A scheduler with prefill steps before decode steps; otherwise as `vllm`."""

    def fill(self, plan: StepPlan, budget: int) -> None:
        self.admit_waiting(plan, self.go_on_with_prompts(plan, budget))
        if plan.tokens:
            self.pause_decodes()
        else:
            self.serve_running(plan, budget)

    def waiting_budget(self) -> int:
        return self.step_budget()  # the whole budget: waiting requests come first

    def go_on_with_prompts(self, plan: StepPlan, budget: int) -> int:
        """Give tokens to admitted requests that do not decode: unfinished prompts and resumed requests.

        Returns the rest of the budget.
        """
        for request in sorted(self.unsteady.values(), key=by_admission):
            room = max(self.room(plan, budget), 0)
            tokens = min(self.wanted(request), room)
            if self.aligned is not None:
                tokens = self.chunk(request, request.computed, tokens)
            if self.encoding is not None and request.arrived.items:
                tokens = self.encoding.limit(request, request.computed, tokens)
            if tokens and not decodes(request) and self.lacking_blocks(request, tokens) <= self.pool.free:
                budget -= self.give(plan, request, tokens)
        return budget


def decodes(request: Request) -> bool:
    """Return whether the request decodes: its prompt and all tokens lost to a preemption are computed."""
    return request.pending == 1 and request.computed >= request.prompt_len
