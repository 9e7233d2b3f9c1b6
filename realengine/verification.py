"""The verification of draft tokens; the output is distributed as if the target model had chosen every token.

A draft from a lookup or a greedy draft model is accepted as far as it equals the target's choice. At each position the
target's token is chosen as without drafts: it is the likeliest token, or is drawn with the uniform number of that
position. A draft token that equals the target's token is accepted. The first draft token that differs is replaced by
the target's token, and all later ones are rejected. So a request gets the same tokens as without drafts, whatever the
drafts are. This is the rejection sampling of Leviathan et al. ("Fast Inference from Transformers via Speculative
Decoding", ICML 2023) for a draft token x of probability 1: x is accepted with the probability p(x) that the target
gives it, and its replacement has the distribution p without x.

A draft token that was drawn, with probability q(x), is accepted with probability min(1, p(x) / q(x)), and its
replacement is drawn from max(p - q, 0); this is the general case in that paper. More drafts are accepted, and the
output still has the distribution p, but the chosen token depends on the draft.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tokentwin.realengine.logit_rules import Logprob
from tokentwin.realengine.sampling import logprobs_of, pick
from tokentwin.realengine.sequence import TokenSequence
from tokentwin.realengine.step import Step
from tokentwin.serving.request import Request


def verify_step(
    step: Step, tokens: Sequence[int], sequences: Mapping[int, TokenSequence], drops_stale: bool = False
) -> None:
    """Give the sampled `tokens` of a step that has ended to the rows in `step.sampled_rows`, and verify drafts.

    It fills `sampled`, `stopped` and `accepted` of the step. With `drops_stale`, a request that was preempted while the
    step was under way gets no token, because the policy computes it again.
    """
    launched = step.launched
    assert launched is not None
    for row, scored in launched.scored.items():
        if (scorer := sequences.get(step.rows[row].request.id)) is not None:
            scorer.scored(*scored)
    samples: dict[int, list[int]] = {}
    for sample, index in enumerate(step.sampled_rows):
        if index is not None:
            samples.setdefault(index, []).append(sample)
    logprobs: Sequence[Logprob | None] = launched.logprobs or [None] * len(tokens)
    alive = {
        index: drawn
        for index, drawn in samples.items()
        if _gets_token(step.rows[index].request, sequences) and not (drops_stale and step.rows[index].request.stale)
    }
    rejected = _rejection_sampled(step, alive, sequences)
    for index, drawn in alive.items():  # other requests stopped, or were aborted, while this step was under way
        request, *_, drafts = step.rows[index]
        sequence = sequences[request.id]
        if request.pools:
            sequence.pooled(launched.pooled[drawn[0]].tolist())
            continue
        chosen = rejected.get(index) or [(tokens[sample], logprobs[sample]) for sample in drawn]
        count, stops = verify(sequence, drafts, chosen)
        if not request.ended:  # an aborted request that the policy keeps for one more step gets no tokens
            step.sampled.extend([request] * (1 + count))
        if drafts:
            step.accepted[request.id] = count
        if stops:
            step.stopped.append(request.id)


def _gets_token(request: Request, sequences: Mapping[int, TokenSequence]) -> bool:
    sequence = sequences.get(request.id)
    return sequence is not None and sequence.request is request


def verify(sequence: TokenSequence, drafts: int, chosen: Sequence[tuple[int, Logprob | None]]) -> tuple[int, bool]:
    """Append the tokens of a step with `drafts` drafts; return the number accepted, and whether the request stops.

    `chosen` has the target's token, and its logprob if wanted, at each of the `1 + drafts` positions. A step always has
    one token of its own in addition to the accepted drafts; an accepted draft that ends the request counts as this
    token. Tokens beyond the request's output length are not appended. Positions without a proposed draft are rejected.
    """
    proposed = sequence.drafts[:drafts]
    for place, (token, logprob) in enumerate(chosen):
        stopped = sequence.append(token, logprob)
        ends = stopped or len(sequence.tokens) == sequence.request.true_len
        if ends or place == len(proposed) or sequence.tokens[-1] != proposed[place]:
            return place, stopped
    raise AssertionError("a step samples one token more than it verifies")


Chosen = list[tuple[int, Logprob | None]]


def _rejection_sampled(
    step: Step, samples: Mapping[int, list[int]], sequences: Mapping[int, TokenSequence]
) -> dict[int, Chosen]:
    """Return the tokens of the rows with drafts that were drawn, by index in `step.rows`, in the form `verify` takes.

    The device works on all rows before the host waits once for all of them.
    """
    assert step.launched is not None
    logits = step.launched.logits
    judged = {}
    for index, drawn in samples.items():
        request, *_, drafts = step.rows[index]
        sequence = sequences[request.id]
        if drafts and sequence.odds and logits is not None:
            judged[index] = sequence, logits[drawn], sequence.drafts[:drafts]
    if not judged:
        return {}
    on_device = torch.cat([judge(*row) for row in judged.values()])
    answers = iter(on_device.tolist())
    chosen: dict[int, Chosen] = {}
    for index, (sequence, of_row, proposed) in judged.items():
        tokens = judged_tokens([next(answers) for _ in range(len(proposed) + 1)], proposed)
        if sequence.logprobs is None:
            chosen[index] = [(token, None) for token in tokens]
            continue
        known = logprobs_of(of_row[: len(tokens)], torch.tensor(tokens, device=of_row.device), sequence.logprobs)
        chosen[index] = list(zip(tokens, known.on_host(), strict=True))
    return chosen


def judge(sequence: TokenSequence, logits: torch.Tensor, proposed: Sequence[int]) -> torch.Tensor:
    """Return, on the device, -1 for each draft that is accepted, else its replacement, and then the token after all.

    `logits` `[1 + drafts, vocab]` are the target's; the drafts `proposed` were drawn with `sequence.odds`, and may be
    fewer. What follows a rejected draft does not count.
    """
    how, first = sequence.sampling, sequence.output_len
    answers = []
    for place, token in enumerate(proposed):
        target, draft = how.probabilities(logits[place]), sequence.odds[place]
        accepted = how.uniform(first + place, "accept") * draft[token] < target[token]
        instead = pick((target - draft).clamp(min=0), how.uniform(first + place, "instead"))
        answers.append(torch.where(accepted, -1, instead).reshape(1))
    after = how.probabilities(logits[len(proposed)])
    answers.append(pick(after, how.uniform(first + len(proposed))).reshape(1))
    return torch.cat(answers)


def judged_tokens(answers: Sequence[int], proposed: Sequence[int]) -> list[int]:
    """Return the accepted drafts and the step's own token, by the `answers` of `judge`."""
    kept = next((place for place, answer in enumerate(answers) if answer >= 0), len(proposed))
    return [*proposed[:kept], answers[kept]]


class VerifiedTokens:
    """The numbers of drafts that a step plans for and accepts, as the scheduler asks for them.

    Attributes:
        accepted_tokens: number of accepted draft tokens of the last step, by request id
        planned: number of draft tokens for which the next step is planned while the drafts are not known. In the
            overlapped loop this is the maximum number, as in vLLM. In the plain loop it is 0, because the engine sets
            the number when the step has ended
    """

    def __init__(self, planned: int) -> None:
        self.accepted_tokens: dict[int, int] = {}
        self.planned = planned

    def proposed(self, request: Request, step: int) -> int:
        return self.planned

    def accepted(self, request: Request, step: int, drafts: int) -> int:
        return self.accepted_tokens[request.id]
