"""The `trtllm` policy: defaults of TensorRT-LLM's PyTorch backend that differ from vLLM's.

Prompts are not split (`enable_chunked_prefill` is off), unless no step has room for them. A request is admitted only if
there are KV blocks for all tokens that it and the running requests may still need (`GUARANTEED_NO_EVICT`), so that no
request is ever preempted. With `batch_wait_timeout_iters`, prompts wait while requests decode, until they fill a share
of the token budget or have waited for this number of steps (`PyExecutor._waiting_requests`). With data-parallel
attention and `attention_dp_timeout_iters`, they wait instead until every rank has a prompt (`_balance_adp_requests`). A
scheduler knows its own rank only: when all ranks have one, as many prompts have come to this rank, on average, as the
harmonic number of the ranks (coupon collector's problem).
"""

from __future__ import annotations

from typing import Any

from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.kv.blocks import Hit
from tokentwin.serving.policies.vllm import VllmScheduler
from tokentwin.serving.request import Request
from tokentwin.serving.step_plan import StepPlan


class TrtllmScheduler(VllmScheduler):
    """A scheduler of whole prompts, without preemption."""

    def __init__(self, config: SchedulerConfig, **engine: Any) -> None:
        super().__init__(config, **engine)
        self._chunks = False
        self._waited = 0  # number of steps for which prompts have been held back
        ranks = sum(1 / n for n in range(1, config.attention_dp_ranks + 1))
        self._prompts_of_all = round(ranks)  # waiting prompts with which all ranks have one
        self._timeout = config.attention_dp_timeout_iters or config.batch_wait_timeout_iters

    def fill(self, plan: StepPlan, budget: int) -> None:
        left = self.serve_running(plan, budget)
        if self.waiting and not plan.preempted and self._stop_waiting(plan, budget):
            self.admit_waiting(plan, left)

    def _stop_waiting(self, plan: StepPlan, budget: int) -> bool:
        if not self._timeout or not plan.tokens:
            return True
        if self._waited >= self._timeout or self._are_enough(plan, budget):
            self._waited = 0
            return True
        self._waited += 1
        return False

    def _are_enough(self, plan: StepPlan, budget: int) -> bool:
        """Return whether the waiting prompts need not wait for more."""
        if self.config.attention_dp_timeout_iters:
            return len(self.waiting) >= self._prompts_of_all
        enough = self.config.batch_wait_max_tokens_ratio * budget
        prompts = 0
        for request in self.waiting:
            prompts += request.known
            if plan.tokens + prompts > budget:
                prompts -= request.known
                break
        return plan.tokens + prompts >= enough

    def steady_steps(self) -> int:
        return 0 if self.waiting and self._timeout else super().steady_steps()

    def _reason_to_reject(self, request: Request) -> str:
        if request.prompt_len > self._budget and self.kv_loading is None:  # otherwise KV may be loaded
            return f"{request.prompt_len} prompt tokens exceed max_num_batched_tokens {self._budget}, and are not split"
        return super()._reason_to_reject(request)

    def _fits(self, request: Request, tokens: int, hit: Hit | None, now: int, reserved: int = 0) -> bool:
        promised = sum(self.most_held(other) for other in self.running.values())
        enough = promised + self.most_held(request) <= self.pool.total
        return enough and super()._fits(request, tokens, hit, now, reserved)
