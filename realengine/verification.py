"""The acceptance of draft tokens, so that the tokens are as if the target model had chosen each by itself.

A draft that was proposed with certainty is accepted as far as it equals the target's choice. At each place the target's
token is chosen as without drafts: the likeliest one, or one drawn with the uniform number of that place. A draft token
that equals it is accepted; the first that does not is replaced by it, and all later ones are rejected. So a request
gets the tokens that it gets without drafts, whatever proposed them. This is the rejection sampling of Leviathan et al.
("Fast Inference from Transformers via Speculative Decoding", ICML 2023) for a draft token x of probability 1: x is
accepted with the probability p(x) that the target gives it, and its replacement has the distribution of p without x.

A draft token that was drawn, with probability q(x), is accepted with probability min(1, p(x) / q(x)), and its
replacement is drawn from max(p - q, 0): their general case. More is accepted, and the distribution is that of p, but
the token that comes depends on the proposal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from realengine.logit_rules import Logprob
from realengine.sampling import logprobs_of, pick
from realengine.sequence import TokenSequence
from realengine.step import Step
from serving.request import Request


def verify_step(step: Step, tokens: Sequence[int], sequences: Mapping[int, TokenSequence]) -> None:
    """Take the `tokens` of a step that has ended, each sampled for the row of its number in `sampled_rows`.

    Afterwards the step has the requests that got tokens, those that a token ended, and the numbers of accepted drafts.
    """
    launched = step.launched
    assert launched is not None
    samples: dict[int, list[int]] = {}
    for sample, index in enumerate(step.sampled_rows):
        if index is not None:
            samples.setdefault(index, []).append(sample)
    logprobs: Sequence[Logprob | None] = launched.logprobs or [None] * len(tokens)
    for index, its in samples.items():
        request, *_, drafts = step.rows[index]
        if request.ended:  # the request stopped, or was aborted, while this step was under way
            continue
        sequence = sequences[request.id]
        if drafts and sequence.odds and launched.logits is not None:
            chosen = rejection_sampled(sequence, drafts, launched.logits[its])
        else:
            chosen = [(tokens[sample], logprobs[sample]) for sample in its]
        count, stops = verify(sequence, drafts, chosen)
        step.sampled.extend([request] * (1 + count))
        if drafts:
            step.accepted[request.id] = count
        if stops:
            step.stopped.append(request.id)


def verify(sequence: TokenSequence, drafts: int, chosen: Sequence[tuple[int, Logprob | None]]) -> tuple[int, bool]:
    """Take the tokens of a step that verified `drafts`; return how many were accepted, and whether the request ends.

    `chosen` are the target's own tokens and their log-probabilities, if wanted, at the `1 + drafts` places. An accepted
    token that ends the request is counted as the step's own token, of which there is always one. Tokens beyond its
    output are not taken, and places without a proposal are rejected.
    """
    proposed = sequence.drafts[:drafts]
    for place, (token, logprob) in enumerate(chosen):
        stopped = sequence.append(token, logprob)
        ends = stopped or len(sequence.tokens) == sequence.request.end_len
        if ends or place == len(proposed) or sequence.tokens[-1] != proposed[place]:
            return place, stopped
    raise AssertionError("a step samples one token more than it verifies")


def rejection_sampled(sequence: TokenSequence, drafts: int, logits: torch.Tensor) -> list[tuple[int, Logprob | None]]:
    """Return the tokens of a step that verified `drafts`, which were drawn with `sequence.odds`, for `verify`.

    They are the accepted ones and the step's own. `logits` are the target's `[1 + drafts, vocab]`; fewer drafts may
    have been proposed.
    """
    how, first = sequence.sampling, sequence.output_len
    chosen, proposed = [], sequence.drafts[:drafts]
    for place, token in enumerate(proposed):
        target, draft = how.probabilities(logits[place]), sequence.odds[place]
        if how.uniform(first + place, "accept") * draft[token] < target[token]:
            chosen.append(token)
            continue
        chosen.append(int(pick((target - draft).clamp(min=0), how.uniform(first + place, "instead"))))
        break
    else:
        place = len(proposed)
        chosen.append(int(pick(how.probabilities(logits[place]), how.uniform(first + place))))
    if sequence.logprobs is None:
        return [(token, None) for token in chosen]
    tokens = torch.tensor(chosen, device=logits.device)
    return list(zip(chosen, logprobs_of(logits[: len(chosen)], tokens, sequence.logprobs).on_host(), strict=True))


class VerifiedTokens:
    """The acceptance of drafts by verification.

    Attributes:
        accepted_tokens: accepted tokens of the drafts that the last step verified, by request
        planned: draft tokens that a next step is planned for while the drafts are not known: in the overlapped loop as
            many as there can be, as in vLLM. In the plain loop the engine says it when the step has ended
    """

    def __init__(self, planned: int) -> None:
        self.accepted_tokens: dict[int, int] = {}
        self.planned = planned

    def proposed(self, request: Request, step: int) -> int:
        return self.planned

    def accepted(self, request: Request, step: int, drafts: int) -> int:
        return self.accepted_tokens[request.id]
