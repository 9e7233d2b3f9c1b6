"""Draft tokens of speculative decoding, as vLLM's scheduler counts and verifies them.

A decoding request brings its drafts to its next step, which verifies them: what is rejected counts as never computed.
"""

from __future__ import annotations

from bisect import insort

from serving.request import Request
from serving.speculative import Acceptance, SpeculativeConfig
from serving.step_plan import StepPlan


class Drafts:
    """The drafts of one scheduler.

    tokens     draft tokens of one request in a step
    lookahead  tokens beyond those of its step that a request holds KV blocks for
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self.tokens = config.num_speculative_tokens
        self.lookahead = config.num_lookahead_tokens
        self._acceptance = Acceptance(config)

    def slots(self, request: Request, end: int) -> int:
        """Tokens that `request` holds KV blocks for in a step that computes its tokens up to `end`."""
        if request.computed > request.cached:  # at admission nothing has been drafted
            return min(end + self.lookahead, request.max_len - 1)
        return end

    def verify(self, plan: StepPlan, request: Request, drafts: int) -> int:
        """How many of its `drafts` are accepted by `plan`, which has ended."""
        accepted = self._acceptance.accepted(request.id, request.outputs, drafts)
        request.drafts += 1
        request.draft_tokens += drafts
        request.accepted_tokens += accepted
        plan.accepted_tokens += accepted
        plan.verified.append((drafts, accepted))
        for _ in range(accepted):
            insort(request.sampled_in, (plan.seq, 1))  # a later step may have been planned
        return accepted
