"""Draft tokens of speculative decoding, as vLLM's scheduler counts and verifies them.

A decoding request brings its drafts to its next step, which verifies them: rejected drafts count as never computed.
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

    Attributes:
        tokens: draft tokens of one request in a step, at most
        lookahead: tokens after the tokens of its step that a request holds KV blocks for
        acceptance: says how many drafts are accepted; coins, until another is put in its place
    """

    def __init__(self, config: SpeculativeConfig, max_model_len: int, overlaps: bool) -> None:
        self._longest = max_model_len
        self.tokens = config.num_speculative_tokens
        self.lookahead = config.num_lookahead_tokens
        self._config = config
        self._overlaps = overlaps

    @cached_property
    def acceptance(self) -> Acceptance:  # an engine sets its own and need not state acceptance
        return Coins(self._config, self._overlaps)

    def slots(self, end: int) -> int:
        """Return the tokens that a request holds KV blocks for in a step that computes its tokens up to `end`."""
        return min(end + self.lookahead, self._longest)

    def room(self, computed: int) -> int:
        """Return the most tokens of a request in a step, if `computed` tokens were computed before.

        The last token of the longest request is never computed.
        """
        return self._longest - 1 - computed

    def padded(self, computed: int) -> int:
        """Return the tokens of a request that decodes in the step of its admission, for which no drafts were proposed.

        vLLM verifies as many tokens anyway, so that all rows are of one size. `computed` were computed before.
        """
        return 1 + self.tokens if computed + self.tokens + 2 <= self._longest else 1

    def verify(self, plan: StepPlan, request: Request, drafts: int) -> int:
        """Return how many of its `drafts` are accepted by `plan`, which has ended; also of drafts beyond its output."""
        accepted = self.acceptance.accepted(request, plan.seq, drafts)
        request.drafts += 1
        request.draft_tokens += drafts
        request.accepted_tokens += accepted
        plan.verified += ((drafts, accepted),)
        kept = min(accepted, request.end_len - request.known - 1)
        plan.accepted_tokens += kept
        for _ in range(kept):
            insort(request.sampled_in, (plan.seq, 1))  # a later step may have been planned
        return accepted


def judge_drafts(scheduler: object, acceptance: Acceptance) -> None:
    """Make `scheduler` ask `acceptance` how many drafts are accepted. Raises UserError if it plans none."""
    drafts = getattr(scheduler, "drafts", None)
    if not isinstance(drafts, Drafts):
        remedy = "plans no drafts; leave scheduler.speculative out, or see docs/policies.md"
        raise UserError("policy", type(scheduler).__name__, remedy)
    drafts.acceptance = acceptance
