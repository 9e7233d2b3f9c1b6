"""The changes that a request makes to its logits before a token is chosen: penalties, bias, and forbidden tokens.

Each change has the same meaning as in vLLM. The host computes the changes that depend on tokens that it has seen. If a
token was sampled that the host has not seen yet, the device adds the changes that follow from it: see
`tokentwin.realengine.sampling.changed_logits`. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]

_NO_TOKENS = np.zeros(0, dtype=np.int32)
_ALWAYS = -1  # stands for any token before a forbidden one


@dataclass(frozen=True, slots=True)
class LogitRules:
    """The rules of one request; the defaults change nothing.

    Attributes:
        presence, frequency: penalties of a token that occurs in the answer; presence is subtracted from its logit once,
            frequency once for each occurrence
        repetition: penalty of a token that occurs in the prompt or the answer; a positive logit is divided by it, a
            negative one multiplied
        bias: pairs of a token and the number added to its logit
        bad_words: token sequences that may not be completed
        allowed: the only tokens that may be chosen; empty for all
        min_p: minimum probability of a token that may be drawn, as a fraction of the likeliest token's probability
        late: tokens that may not be among the first `min_tokens` tokens of the answer
    """

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed: tuple[int, ...] = ()
    min_p: float = 0.0
    min_tokens: int = 0
    late: tuple[int, ...] = ()

    @property
    def change_most(self) -> bool:
        """True if the rules last for the whole answer: all but the ban of tokens before `min_tokens`."""
        return replace(self, min_tokens=0, late=()) != LogitRules()


PENALTIES = LogitRules(presence=0.1, frequency=0.1, repetition=1.05)
"""The rules of requests that change logits in a replay, and in measurements."""


class LogitChanges(NamedTuple):
    """The changes to the logits of one sample. A token occurs at most once in a field, except in `banned`.

    Attributes:
        unseen: True if the answer has one token more than is known here
        floor: minimum difference between a logit and the largest logit, at most 0; -inf for no minimum
        prompt: tokens of the prompt; empty without a repetition penalty
        outputs: `[O, 2]` tokens of the answer, each with its number of occurrences
        biased: tokens with a bias; `bias` is the number added to the logit of each
        banned: `[B, 2]` forbidden tokens, each with the token that must come directly before it for the ban to apply;
            -1 for any token
    """

    presence: float
    frequency: float
    repetition: float
    floor: float
    unseen: bool
    prompt: Ints
    outputs: Ints
    biased: Ints
    bias: Floats
    banned: Ints
    allowed: Ints


class RuledLogits:
    """The rules of one request with `prompt`, applied to one token after another."""

    def __init__(self, rules: LogitRules, prompt: Sequence[int]) -> None:
        self._rules = rules
        self._prompt = np.unique(np.array(prompt, dtype=np.int32)) if rules.repetition != 1 else _NO_TOKENS
        self._biased = np.array([token for token, _ in rules.bias], dtype=np.int32)
        self._bias = np.array([number for _, number in rules.bias], dtype=np.float32)
        self._allowed = np.array(sorted({*rules.allowed}), dtype=np.int32)

    def changes(self, outputs: Sequence[int], unseen: bool, temperature: float, in_grammar: bool) -> LogitChanges:
        """Return the changes for the next token, which follows `outputs` and, if `unseen`, one unknown token.

        A grammar has precedence over `min_tokens`, because an answer that completes the grammar must end.
        """
        rules = self._rules
        banned = list(self._bad_ends(outputs, unseen))
        if len(outputs) + unseen < rules.min_tokens and not in_grammar:
            banned += [(token, _ALWAYS) for token in rules.late]
        return LogitChanges(
            rules.presence,
            rules.frequency,
            rules.repetition,
            temperature * log(rules.min_p) if rules.min_p > 0 else -np.inf,
            unseen,
            self._prompt,
            np.stack(np.unique(np.array(outputs, dtype=np.int32), return_counts=True), 1).astype(np.int32),
            self._biased,
            self._bias,
            np.array(banned, dtype=np.int32).reshape(-1, 2),
            self._allowed,
        )

    def _bad_ends(self, outputs: Sequence[int], unseen: bool) -> list[tuple[int, int]]:
        """Return the tokens that would complete a bad word, each with the unseen token that must precede it, or -1."""
        ends = []
        for *begins, end in self._rules.bad_words:
            after = begins.pop() if unseen and begins else _ALWAYS
            if not begins or list(outputs[-len(begins) :]) == begins:
                ends.append((end, after))
        return ends


class StepChanges(NamedTuple):
    """The changes of a step to the logits of its samples `samples` `[M]`.

    In pairs and triples the first number is an index into `samples`, and the second is a token.

    Attributes:
        numbers: `[M, 4]` presence, frequency, repetition, floor
        unseen: `[M]`
        limited: `[M]` True if only some tokens are allowed
        prompt, allowed: `[., 2]`; outputs, banned `[., 3]`
        bias: `[., 2]` sample and token; `biases` `[.]` is the number added to each
    """

    samples: Ints
    numbers: Floats
    unseen: NDArray[np.bool_]
    limited: NDArray[np.bool_]
    prompt: Ints
    outputs: Ints
    bias: Ints
    biases: Floats
    banned: Ints
    allowed: Ints


def step_changes(by_sample: Sequence[LogitChanges | None], first: int = 0) -> StepChanges | None:
    """Combine the changes of each sample of a step from sample `first` on; return None if no sample has any."""
    changed = [(sample, changes) for sample, changes in enumerate(by_sample, first) if changes is not None]
    if not changed:
        return None
    samples, changes = zip(*changed, strict=True)
    return StepChanges(
        np.array(samples, dtype=np.int32),
        np.array([change[:4] for change in changes], dtype=np.float32),
        np.array([change.unseen for change in changes]),
        np.array([len(change.allowed) > 0 for change in changes]),
        _numbered([change.prompt[:, None] for change in changes]),
        _numbered([change.outputs for change in changes]),
        _numbered([change.biased[:, None] for change in changes]),
        np.concatenate([change.bias for change in changes]),
        _numbered([change.banned for change in changes]),
        _numbered([change.allowed[:, None] for change in changes]),
    )


def _numbered(rows: Sequence[Ints]) -> Ints:
    """Return the concatenated arrays of rows, where each row begins with the index of its array."""
    numbers = np.repeat(np.arange(len(rows), dtype=np.int32), [len(row) for row in rows])
    return np.concatenate([numbers[:, None], np.concatenate(rows)], 1)


class Logprob(NamedTuple):
    """The natural logarithm of a token's probability by the model, before temperature and limits.

    `top` has the likeliest tokens with their log-probabilities, in descending order.
    """

    logprob: float
    top: Sequence[tuple[int, float]] = ()

    def among(self, alternatives: int) -> Logprob:
        """Return the logprob with at most this number of alternatives."""
        return Logprob(self.logprob, self.top[:alternatives])


class PromptLogprob(NamedTuple):
    """The `Logprob` of a token of a prompt, and its rank: 1 for the likeliest token at its place."""

    logprob: float
    rank: int
    top: Sequence[tuple[int, float]] = ()
