"""Draft tokens of speculative decoding, as vLLM's scheduler counts and verifies them.

A decoding request brings its drafts to its next step, which verifies them: what is rejected counts as never computed.
"""

from __future__ import annotations

from bisect import insort
from functools import cached_property

from serving.errors import UserError
from serving.request import Request
from serving.speculative import Acceptance, Coins, SpeculativeConfig
from serving.step_plan import StepPlan


class Drafts:
    """The drafts of one scheduler.

    lookahead   tokens beyond those of its step that a request holds KV blocks for
    acceptance  what becomes of them; until another is put in its place, coins
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self.lookahead = config.num_lookahead_tokens
        self._config = config

    @cached_property
    def acceptance(self) -> Acceptance:  # an engine, which puts its own here, need not state any
        return Coins(self._config)

    def slots(self, request: Request, end: int) -> int:
        """Tokens that `request` holds KV blocks for in a step that computes its tokens up to `end`."""
        if request.computed > request.cached:  # at admission nothing has been drafted
            return min(end + self.lookahead, request.max_len - 1)
        return end

    def verify(self, plan: StepPlan, request: Request, drafts: int) -> int:
        """How many of its `drafts` are accepted by `plan`, which has ended."""
        accepted = self.acceptance.accepted(request, plan.seq, drafts)
        request.drafts += 1
        request.draft_tokens += drafts
        request.accepted_tokens += accepted
        plan.accepted_tokens += accepted
        plan.verified.append((drafts, accepted))
        for _ in range(accepted):
            insort(request.sampled_in, (plan.seq, 1))  # a later step may have been planned
        return accepted


def judge_drafts(scheduler: object, acceptance: Acceptance) -> None:
    """Make `scheduler` take what `acceptance` says for what becomes of drafts. Raises UserError if it plans none."""
    drafts = getattr(scheduler, "drafts", None)
    if not isinstance(drafts, Drafts):
        remedy = "plans no drafts; leave scheduler.speculative out, or see docs/policies.md"
        raise UserError("policy", type(scheduler).__name__, remedy)
    drafts.acceptance = acceptance
