"""Draft tokens of speculative decoding, as vLLM's scheduler counts and verifies them.

The next step of a decoding request verifies its drafts. Rejected drafts count as not computed.
"""

from __future__ import annotations

from bisect import insort
from functools import cached_property

from tokentwin.serving.errors import UserError
from tokentwin.serving.request import Request
from tokentwin.serving.speculative import Acceptance, Coins, SpeculativeConfig
from tokentwin.serving.step_plan import StepPlan


class Drafts:
    """The drafts of one scheduler.

    Attributes:
        tokens: maximum number of draft tokens of one request in a step
        lookahead: number of tokens beyond those of its step that a request holds KV blocks for
        varies: True if the number of draft tokens depends on the size of the step
        acceptance: object that decides how many drafts are accepted; by default `Coins`
    """

    def __init__(self, config: SpeculativeConfig, max_model_len: int, overlaps: bool) -> None:
        self._longest = max_model_len
        self.tokens = config.num_speculative_tokens
        self.lookahead = config.num_lookahead_tokens
        self.varies = config.num_speculative_tokens_per_batch_size is not None
        self._config = config
        self._overlaps = overlaps

    @cached_property
    def acceptance(self) -> Acceptance:  # not made if an engine sets its own; its config may lack rates
        return Coins(self._config, self._overlaps)

    def slots(self, end: int) -> int:
        """Return the number of tokens that a request needs KV blocks for in a step that computes it up to `end`."""
        return min(end + self.lookahead, self._longest)

    def room(self, computed: int) -> int:
        """Return the maximum number of tokens of a request in a step, if `computed` tokens were computed before.

        The last token of a request of maximum length is never computed.
        """
        return self._longest - 1 - computed

    def padded(self, computed: int) -> int:
        """Return the number of tokens of a request that decodes in the step of its admission, without proposed drafts.

        vLLM verifies a full number of draft tokens anyway, so that all rows have one size. `computed` is the number of
        tokens computed before.
        """
        return 1 + self.tokens if computed + self.tokens + 2 <= self._longest else 1

    def limit(self, plan: StepPlan) -> None:
        """Let the requests of `plan`, which is complete, have no more drafts than a step of this size proposes."""
        most = self._config.drafted_by(plan.decode_rows + plan.prefill_rows)
        for row in plan.listed:
            row.request.proposed = min(row.request.proposed, most)

    def verify(self, plan: StepPlan, request: Request, drafts: int) -> int:
        """Return how many of the request's `drafts` drafts `plan`, which has ended, accepts, and count them.

        Accepted drafts may lie beyond the end of the request's output.
        """
        accepted = self.acceptance.accepted(request, plan.seq, drafts)
        if self.varies and not self._overlaps:  # what is proposed is known only now
            request.proposed = min(request.proposed, self._config.drafted_by(plan.decode_rows + plan.prefill_rows))
        request.drafts += 1
        request.draft_tokens += drafts
        request.accepted_tokens += accepted
        plan.verified += ((drafts, accepted),)
        kept = min(accepted, request.true_len - request.known - 1)
        plan.accepted_tokens += kept
        for _ in range(kept):
            insort(request.sampled_in, (plan.seq, 1))  # a later step may have been planned already
        return accepted


def judge_drafts(scheduler: object, acceptance: Acceptance) -> None:
    """Make `scheduler` ask `acceptance` how many drafts are accepted. Raises UserError if it plans no drafts."""
    drafts = getattr(scheduler, "drafts", None)
    if not isinstance(drafts, Drafts):
        remedy = "plans no drafts; leave scheduler.speculative out, or see docs/policies.md"
        raise UserError("policy", type(scheduler).__name__, remedy)
    drafts.acceptance = acceptance
