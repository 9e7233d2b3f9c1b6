"""The structured answers of a twin: tokens that follow a grammar, chosen by chance instead of by a model.

llguidance gives the tokens that may come next. Among them, words and closing characters are the likeliest, so that an
answer is short and is complete at some point. The same grammar and seed give the same answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokentwin.apiserver.filler import PlainTexts
from tokentwin.realengine.grammar import Grammar, library
from tokentwin.realengine.tokenizer import Tokenizer
from tokentwin.serving.errors import UserError

MOST_TOKENS = 4096  # length at which an answer must be complete, if it may be as long
_LONG = 64  # tokens after which an answer opens nothing new that it need not open
_WEIGHTS = {"}": 5.0, "]": 5.0, '"': 6.0, ",": 1.0, "{": 0.5, "[": 0.5, "-": 0.1, ".": 0.3}
_WEIGHTS_LATE = {**_WEIGHTS, '"': 0.1, ",": 0.1, "{": 0.01, "[": 0.01}
_DIGIT, _OTHER = 0.3, 0.05

Ids = NDArray[np.int64]


class StructuredFiller:
    """A writer of answers in the tokens of a tokenizer: the one in `folder` or, without one, `PlainTexts`."""

    def __init__(self, folder: str, vocab_size: int) -> None:
        self._ids: Ids | None = None  # of the tokenizer, by token of the grammar; None if they are the same
        if folder:
            texts = Tokenizer(Path(folder))
            eos = [] if texts.eos_id is None else [texts.eos_id]
            self._tokens = library().LLTokenizer(str(Path(folder) / "tokenizer.json"), eos_token=eos or None)
            spelled = [texts.decode([token]) for token in range(self._tokens.vocab_size)]
        else:
            spelling = PlainTexts(vocab_size).spelling()
            self._ids = np.array(list(spelling))
            self._tokens = _tokenizer_of(spelling)
            spelled = [text.decode("utf-8", "replace") for text in spelling.values()]
        self._size: int = self._tokens.vocab_size
        plain = [token for token, text in enumerate(spelled) if re.fullmatch(r" ?[a-z]{3,8}", text)]
        self._words: Ids = np.array(plain, dtype=np.int64)
        characters = {text: token for token, text in enumerate(spelled) if re.fullmatch("[!-~]", text)}
        self._characters = sorted(characters.items())
        self._compiled: tuple[str, Any] = "", None  # the last grammar, because `n` answers follow one

    def write(self, grammar: str, seed: int, least: int, most: int) -> list[int]:
        """Return the answer: `least` or more tokens, if the grammar allows, and `most` + 1 tokens if it goes on.

        It has at least one token, although a grammar may allow an empty text: without tokens an answer has no times.
        Raises UserError if the grammar allows only the empty text or gives up, or if the answer is not complete after
        4,096 tokens.
        """
        chance = Random(seed)
        if grammar != self._compiled[0]:
            self._compiled = grammar, library().LLMatcher(self._tokens, grammar, log_level=0)
        matcher = self._compiled[1].deep_copy()
        answer: list[int] = []
        words, patience = 0, chance.randint(1, 3)
        while len(answer) <= most and not matcher.is_stopped():
            may_end = matcher.is_accepting() and len(answer) >= max(least, 1)
            if may_end and (len(answer) > _LONG or chance.random() < 0.5):
                break
            new = matcher.compute_ff_tokens()
            if not new:
                allowed = self._allowed(Grammar(matcher).mask(self._size))
                if not allowed.any():  # only the end may follow
                    break
                token, is_word = self._choose(allowed, chance, words < patience, len(answer) > _LONG)
                words, patience = (words + 1, patience) if is_word else (0, chance.randint(1, 3))
                new = [token]
            matcher.consume_tokens(new)
            answer += new
            if matcher.is_error():
                raise UserError("structured output", None, "needs too much work; simplify the schema or the expression")
            if len(answer) > MOST_TOKENS:
                remedy = f"is not complete after {MOST_TOKENS} tokens of a twin, which knows no model; bound its length"
                raise UserError("structured output", None, remedy)
        if not answer:
            raise UserError("structured output", None, "allows only the empty text; allow at least one character")
        answer = answer[: most + 1]
        return answer if self._ids is None else self._ids[answer].tolist()

    def _allowed(self, mask: NDArray[np.int32]) -> NDArray[np.bool_]:
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self._size].astype(bool)
        allowed[self._tokens.eos_token] = False
        return allowed

    def _choose(self, allowed: NDArray[np.bool_], chance: Random, may_go_on: bool, late: bool) -> tuple[int, bool]:
        """Return the next token, and whether it is a word; a text ends after some words, if it may."""
        words = self._words[allowed[self._words]]
        if len(words) and may_go_on:
            return int(chance.choice(words)), True
        characters = [(text, token) for text, token in self._characters if allowed[token]]
        if len(words):  # in a text
            ends = [pair for pair in characters if pair[0] == '"'] or [
                pair for pair in characters if not pair[0].isalnum() and pair[0] != "\\"
            ]
            if ends:
                return chance.choice(ends)[1], False
        if characters:
            weights = [self._weight(text, late) for text, _ in characters]
            return chance.choices(characters, weights)[0][1], False
        return int(chance.choice(np.flatnonzero(allowed))), False

    def _weight(self, character: str, late: bool) -> float:
        if character.isdigit():
            return _DIGIT
        return (_WEIGHTS_LATE if late else _WEIGHTS).get(character, _OTHER)


class _Spelled:
    """What llguidance wants to know of a tokenizer whose first 256 tokens are bytes."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = [*tokens, b"<end>"]
        self.eos_token_id = len(tokens)
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def _tokenizer_of(spelling: Mapping[int, bytes]) -> Any:
    spelled = _Spelled(list(spelling.values()))
    return library().LLTokenizer(library().TokenizerWrapper(spelled))
