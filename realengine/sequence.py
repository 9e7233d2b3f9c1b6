"""The tokens of one request in the engine, and the conditions that end it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch

from realengine.grammar import Bits, Grammar
from realengine.logit_rules import LogitChanges, LogitRules, Logprob, RuledLogits
from realengine.sampling import SamplingParams
from serving.request import Request
from serving.step_plan import Row


class TokenSequence:
    """Prompt and output token ids of `request`.

    Attributes:
        forced: output tokens to take instead of the sampled ones (trace replay)
        stop_ids: tokens that end the request
        on_token: called with every output token and, if `logprobs` is set, its logprob beside as many others; a return
            value of True ends the request (a stop string)
        rules: changes to its logits
        grammar: grammar of its answer, once it is compiled; it follows the sampled tokens, even if other tokens are
            forced
        drafts: tokens proposed to follow, for the next step to verify
        odds: the probabilities `[vocab]` with which each draft token was drawn; empty if it was proposed with certainty
    """

    def __init__(
        self,
        request: Request,
        prompt: Sequence[int],
        *,
        forced: Sequence[int] | None = None,
        sampling: SamplingParams | None = None,
        stop_ids: Collection[int] = (),
        on_token: Callable[[int, Logprob | None], bool] | None = None,
        logprobs: int | None = None,
        rules: LogitRules | None = None,
    ) -> None:
        self.request = request
        self.tokens = list(prompt)
        self.sampling = sampling or SamplingParams()
        if self.sampling.seed is None:
            self.sampling = replace(self.sampling, seed=request.id)
        self.prompt_len = len(prompt)
        self.drafts: list[int] = []
        self.odds: list[torch.Tensor] = []
        self._forced = forced
        self._stop_ids = stop_ids
        self._on_token = on_token
        self.logprobs = logprobs
        self._ruled = None if rules is None else RuledLogits(rules, prompt)
        self.grammar: Grammar | None = None

    @property
    def outputs(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    def inputs(self, start: int, count: int, seat: int, drafts: int) -> Sequence[int]:
        """Return `count` token ids from position `start`, of which the last are `drafts`.

        A draft is token 0 if none is proposed. A token that is not seen yet stands for the one at `seat`, unless it is
        forced.
        """
        known = self.tokens[start : start + count]
        if len(known) == count:
            return known
        if drafts:
            return [*known, *self.drafts, *[0] * drafts][:count]
        output = start + count - 1 - self.prompt_len  # the overlapped loop is at most one token ahead
        return [*known, -1 - seat if self._forced is None else self._forced[output]]

    def masks(self, drafts: int, vocab_size: int) -> tuple[Bits, ...]:
        """Return the masks of the next token and of the one after each draft, as rows of `TokenMasks.bits`.

        There are none without a grammar. No mask follows a draft token that the grammar forbids: nothing is sampled
        there.
        """
        if self.grammar is None:
            return ()
        masks = [self.grammar.mask(vocab_size)]
        for token in self.drafts[:drafts]:
            if not self.grammar.advance([token]):
                break
            masks.append(self.grammar.mask(vocab_size))
        self.grammar.take_back(len(masks) - 1)
        return tuple(masks)

    def changes(self, drafts: int, unseen: bool) -> tuple[LogitChanges, ...]:
        """Return the changes to the logits of the next token and of the one after each draft; nothing without rules.

        `unseen` says whether a token was sampled that is not known here.
        """
        if self._ruled is None:
            return ()
        outputs, heat, in_grammar = self.outputs, self.sampling.temperature, self.grammar is not None
        proposed = [*self.drafts, *[0] * drafts][:drafts]
        return tuple(
            self._ruled.changes([*outputs, *proposed[:place]], unseen, heat, in_grammar) for place in range(drafts + 1)
        )

    def append(self, sampled: int, logprob: Logprob | None = None) -> bool:
        """Append one output token; return whether it ends the request before its output length."""
        token = sampled if self._forced is None else self._forced[self.output_len]
        self.tokens.append(token)
        stopped = token in self._stop_ids
        if self.grammar is not None and not stopped:
            stopped = self.grammar.take(sampled)
        if self._on_token is not None:
            stopped = self._on_token(token, self._wanted(logprob)) or stopped
        return stopped

    def _wanted(self, logprob: Logprob | None) -> Logprob | None:
        """Return the logprob without the alternatives that only other requests in the step want."""
        if self.logprobs is None or logprob is None:
            return None
        return Logprob(logprob.logprob, logprob.top[: self.logprobs])


def masks_of_rows(
    rows: Sequence[Row], sequences: Sequence[TokenSequence | None], vocab_size: int
) -> list[tuple[Bits, ...]]:
    """Return the masks for each row that samples for a grammar: for its own token, and after each draft."""
    return [
        sequence.masks(row.drafts, vocab_size) if sequence and row.samples else ()
        for row, sequence in zip(rows, sequences, strict=True)
    ]
