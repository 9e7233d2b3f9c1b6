"""The tokens of one request in the engine, and what ends it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch

from realengine.grammar import Bits, Grammar
from realengine.logit_rules import LogitChanges, LogitRules, RuledLogits
from realengine.logprob import Logprob
from realengine.sampling import SamplingParams
from serving.request import Request
from serving.step_plan import Row


class TokenSequence:
    """Prompt and output token ids of `request`.

    forced    output tokens to take instead of the sampled ones (trace replay)
    stop_ids  tokens that end the request
    on_token  sees every output token and how likely it was, where `logprobs` says beside how many others that is
              wanted; returning True ends the request (a stop string)
    rules     what is done to its logits
    grammar   what its answer may be, once that is compiled; it goes by what is sampled, also where other tokens are
              forced
    drafts    tokens proposed to follow, for the next step to verify
    odds      the probabilities `[vocab]` with which each of them was drawn; empty where it was proposed with certainty
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
        """`count` token ids from position `start`, of which the last are `drafts`: token 0 where none is proposed. One
        not seen yet is the one at `seat`, unless forced."""
        known = self.tokens[start : start + count]
        if len(known) == count:
            return known
        if drafts:
            return [*known, *self.drafts, *[0] * drafts][:count]
        ahead = start + count - 1 - self.prompt_len  # the overlapped loop is one token ahead at most
        return [*known, -1 - seat if self._forced is None else self._forced[ahead]]

    def masks(self, drafts: int, vocab_size: int) -> tuple[Bits, ...]:
        """What the next token may be, and the one after each of so many drafts, as rows of `TokenMasks.bits`; none
        without a grammar. What follows a draft token that may not be is not sampled for anybody."""
        if self.grammar is None:
            return ()
        found = [self.grammar.mask(vocab_size)]
        for token in self.drafts[:drafts]:
            if not self.grammar.ahead([token]):
                break
            found.append(self.grammar.mask(vocab_size))
        self.grammar.back(len(found) - 1)
        return tuple(found)

    def changes(self, drafts: int, unseen: bool) -> tuple[LogitChanges, ...]:
        """What is done to the logits of the next token, and of the one after each of so many drafts; nothing without
        rules. `unseen`: whether a token was sampled that is not known here."""
        if self._ruled is None:
            return ()
        outputs, heat, in_grammar = self.outputs, self.sampling.temperature, self.grammar is not None
        proposed = [*self.drafts, *[0] * drafts][:drafts]
        return tuple(
            self._ruled.changes([*outputs, *proposed[:place]], unseen, heat, in_grammar) for place in range(drafts + 1)
        )

    def append(self, sampled: int, logprob: Logprob | None = None) -> bool:
        """Take one output token; whether it ends the request before its output length."""
        token = sampled if self._forced is None else self._forced[self.output_len]
        self.tokens.append(token)
        stopped = token in self._stop_ids
        if self.grammar is not None and not stopped:
            stopped = self.grammar.take(sampled)
        if self._on_token is not None:
            stopped = self._on_token(token, self._wanted(logprob)) or stopped
        return stopped

    def _wanted(self, logprob: Logprob | None) -> Logprob | None:
        """Without what others in the step want to know."""
        if self.logprobs is None or logprob is None:
            return None
        return Logprob(logprob.logprob, logprob.top[: self.logprobs])


def masks_of_rows(
    rows: Sequence[Row], sequences: Sequence[TokenSequence | None], vocab_size: int
) -> list[tuple[Bits, ...]]:
    """For each row that samples for a grammar, what its tokens may be: after its own, and after each draft."""
    return [
        sequence.masks(row.drafts, vocab_size) if sequence and row.samples else ()
        for row, sequence in zip(rows, sequences, strict=True)
    ]
