"""The number of tokens that a prompt may have, which bounds the work of tokenising it.

A tokenizer takes seconds and hundreds of bytes a token. So a text of megabytes is not tokenised to learn that it is too
long: vLLM refuses it by its characters, and here a part of it that already has too many tokens is enough, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tokentwin.apiserver.filler import Texts
from tokentwin.apiserver.openai_api.refusal import Refusal

_FIRST = 1 << 17  # characters of the first part of a long text; each next part is twice as long


@dataclass(frozen=True, slots=True)
class PromptLength:
    """Use all tokens of a prompt, which must be at most `most`, or keep the first or last `most` of them."""

    most: int
    keeps: Literal["all", "first", "last"] = "all"

    def tokens(self, texts: Texts, text: str, special: bool, field: str) -> list[int]:
        """Return the tokens of `text` that are used. Raises Refusal if they must all be used, but are too many.

        Where a part is cut from the text, one token may become several, but not more than it has characters.
        """
        if self.keeps == "all" and len(text) > self.most * texts.longest:
            raise self._refusal(f"{len(text)} characters", field)
        length = _FIRST
        while length < len(text):
            part = text[-length:] if self.keeps == "last" else text[:length]
            tokens = texts.encode(part, special)
            if len(tokens) > self.most + texts.longest:
                if self.keeps == "all":
                    raise self._refusal(f"more than {self.most} tokens", field)
                return self.cut(tokens)
            length *= 2
        return self.cut(texts.encode(text, special))

    def cut(self, tokens: list[int]) -> list[int]:
        """Return the tokens that are used."""
        if self.keeps == "all":
            return tokens
        return tokens[: self.most] if self.keeps == "first" else tokens[max(len(tokens) - self.most, 0) :]

    def _refusal(self, what: str, field: str) -> Refusal:
        return Refusal(400, f"{field}: has {what}; the model takes at most {self.most} tokens", field)
