"""Which draft tokens are accepted: those that the target model gives itself.

At each place of a draft the target's token is chosen as without drafts: the likeliest one, or one drawn with the
uniform number of that place. A draft token that equals it is accepted; the first that does not is replaced by it, and
what follows is rejected. So a request gets the tokens that it gets without drafts, whatever proposed them, as in vLLM's
`rejection_sample_method: strict`.

For a drafter that proposes one token x with certainty this is the rejection sampling of Leviathan et al. ("Fast
Inference from Transformers via Speculative Decoding", ICML 2023): x is accepted with the probability p(x) that the
target gives it, and what replaces it has the distribution of p without x.
"""

from __future__ import annotations

from collections.abc import Sequence

from realengine.sequence import TokenSequence
from serving.request import Request


def verify(sequence: TokenSequence, drafts: int, chosen: Sequence[tuple[int, float | None]]) -> tuple[int, bool]:
    """Take the tokens of a step that verified `drafts`: how many of those were accepted, and whether the request ends.

    `chosen` are the target's own tokens and their log-probabilities, if wanted, at the `1 + drafts` places. An accepted
    token that ends the request is counted as the step's own token, of which there is always one.
    """
    proposed = sequence.drafts[:drafts]
    for place, (token, logprob) in enumerate(chosen):
        stopped = sequence.append(token, logprob)
        if stopped or place == drafts or sequence.tokens[-1] != proposed[place]:
            return place, stopped
    raise AssertionError("a step samples one token more than it verifies")


class VerifiedTokens:
    """Acceptance as it turned out.

    accepted_tokens  of the drafts that the last step verified, by request
    """

    def __init__(self) -> None:
        self.accepted_tokens: dict[int, int] = {}

    def proposed(self, request: Request, step: int) -> int:
        return 0  # the engine says when the step has ended

    def accepted(self, request: Request, step: int, drafts: int) -> int:
        return self.accepted_tokens[request.id]
