"""The tokens of one request in the engine, and the conditions that end it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch

from tokentwin.realengine.grammar import Bits
from tokentwin.realengine.grammar_compiler import AnswerGrammar
from tokentwin.realengine.logit_rules import LogitChanges, LogitRules, Logprob, PromptLogprob, RuledLogits
from tokentwin.realengine.sampling import SamplingParams, UniformNumbers
from tokentwin.serving.request import Request
from tokentwin.serving.step_plan import Row


class TokenSequence:
    """The prompt and output token ids of `request`.

    Attributes:
        forced: output tokens that replace the sampled ones (trace replay)
        stop_ids: tokens that end the request
        on_token: function called with every output token and its logprob; returning True ends the request (for a stop
            string)
        on_failed: function called when the grammar of the answer has failed, which ends the request
        on_pooled: function called with the result of a pooling request, the final hidden state of its last token
        on_scored: function called with logprobs of tokens of the prompt, and the position of the first of them
        logprobs: number of alternatives in each logprob; None for no logprobs
        score_top: number of alternatives in each logprob of the prompt; None for no such logprobs
        rules: changes to the request's logits
        salt: text that requests must share to share KV
        is_plain: True if a step needs no more than tokens and draws of this request, unless it has a grammar
        grammar: grammar of the answer, once it is compiled; it reads the sampled tokens, even if other tokens are
            forced
        drafts: draft tokens that the next step verifies
        odds: for each draft token the distribution `[vocab]` from which it was drawn; empty if drafts were not drawn
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
        on_pooled: Callable[[list[float]], None] | None = None,
        on_failed: Callable[[], None] | None = None,
        score_top: int | None = None,
        on_scored: Callable[[int, list[PromptLogprob]], None] | None = None,
        salt: str = "",
    ) -> None:
        self.request = request
        self.salt = salt
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
        self._on_pooled = on_pooled
        self._on_failed = on_failed
        self.logprobs = logprobs
        self.score_top = score_top
        self._on_scored = on_scored
        self._ruled = None if rules is None else RuledLogits(rules, prompt)
        self.grammar: AnswerGrammar | None = None
        self.is_plain = logprobs is score_top is rules is None and not request.pools
        self._uniform = UniformNumbers(self.sampling.seed or 0)
        self.greedy = self.sampling.greedy

    def uniform(self, step: int) -> float:
        """Return the uniform number for output token `step`, or 0 if it is not drawn."""
        return 0.0 if self.greedy else self._uniform(step)

    @property
    def outputs(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    def inputs(self, start: int, count: int, seat: int, drafts: int) -> Sequence[int]:
        """Return `count` token ids from position `start` on, the last `drafts` of which are draft tokens.

        A draft that was not proposed is token 0. If the host has not seen the last token yet, its id is `-1 - seat`,
        unless the token is forced.
        """
        known = self.tokens[start : start + count]
        if len(known) == count:
            return known
        if drafts:
            return [*known, *self.drafts, *[0] * drafts][:count]
        output = start + count - 1 - self.prompt_len  # the overlapped loop is at most one token ahead
        return [*known, -1 - seat if self._forced is None else self._forced[output]]

    def masks(self, drafts: int, vocab_size: int) -> tuple[Bits, ...]:
        """Return the masks of the next token and of the token after each draft, as rows of `TokenMasks.bits`.

        Without a grammar there are none. After a draft token that the grammar forbids there are no masks, because
        tokens after it are rejected.
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
        """Return the logit changes for the next token and for the token after each draft; none without rules.

        `unseen` is True if a token was sampled that the host has not seen yet.
        """
        if self._ruled is None:
            return ()
        outputs, heat, in_grammar = self.outputs, self.sampling.temperature, self.grammar is not None
        proposed = [*self.drafts, *[0] * drafts][:drafts]
        return tuple(
            self._ruled.changes([*outputs, *proposed[:place]], unseen, heat, in_grammar) for place in range(drafts + 1)
        )

    def append(self, sampled: int, logprob: Logprob | None = None) -> bool:
        """Append one output token; return whether it ends the request, for a reason other than its output length."""
        token = sampled if self._forced is None else self._forced[self.output_len]
        self.tokens.append(token)
        stopped = token in self._stop_ids
        if self.grammar is not None and not stopped:
            stopped = self.grammar.take(sampled)
        if self.grammar is not None and self.grammar.failed and self._on_failed is not None:
            self._on_failed()
        if self._on_token is not None:
            stopped = self._on_token(token, self._wanted(logprob)) or stopped
        return stopped

    def mute(self) -> None:
        """Call no function of the request any more, because its client has gone."""
        self._on_token = self._on_pooled = self._on_failed = self._on_scored = None

    def pooled(self, state: list[float]) -> None:
        """Pass on the final hidden state of the last prompt token."""
        if self._on_pooled is not None:
            self._on_pooled(state)

    def scored(self, position: int, logprobs: Sequence[PromptLogprob]) -> None:
        """Pass on the logprobs of the tokens of the prompt from `position` on."""
        if self._on_scored is not None:
            self._on_scored(position, [one._replace(top=one.top[: self.score_top]) for one in logprobs])

    def _wanted(self, logprob: Logprob | None) -> Logprob | None:
        """Return the logprob with only as many alternatives as this request wants."""
        if self.logprobs is None or logprob is None:
            return None
        return logprob.among(self.logprobs)


def masks_of_rows(
    rows: Sequence[Row], sequences: Sequence[TokenSequence | None], vocab_size: int
) -> list[tuple[Bits, ...]]:
    """Return the masks of each row with a grammar that samples: for its next token, and after each draft."""
    return [
        sequence.masks(row.drafts, vocab_size) if sequence and row.samples else ()
        for row, sequence in zip(rows, sequences, strict=True)
    ]
