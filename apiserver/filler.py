"""Text where no model speaks: words that a twin answers with, and a tokenizer for models that bring none."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, Protocol
from zlib import crc32

_WORDS = 512


class Texts(Protocol):
    """A tokenizer: text to token ids and back, and chats to prompts. `eos_id` ends a text, where that is known.

    `special`: whether special tokens are added to what is encoded, and kept in what is decoded.
    """

    @property
    def eos_id(self) -> int | None: ...
    def encode(self, text: str, special: bool = False) -> list[int]: ...
    def decode(self, ids: Sequence[int], special: bool = False) -> str: ...
    def names(self, ids: Sequence[int]) -> list[str]: ...
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        special: bool = False,
        more: Mapping[str, Any] | None = None,
    ) -> list[int]: ...


def filler_tokens(texts: Texts, vocab_size: int) -> list[int]:
    """Tokens that are whole words, each one token again when the text comes back; the first 512 of the vocabulary.

    Raises ValueError if the tokenizer has none.
    """
    words = []
    for token in range(vocab_size):
        text = texts.decode([token])
        if re.fullmatch(r" [a-z]{3,}", text) and texts.encode(text) == [token]:
            words.append(token)
            if len(words) == _WORDS:
                break
    if not words:
        raise ValueError("no token is a word")
    return words


class Words:
    """As a `Detokenizer` for tokens that are each a text of its own, where no stop string is looked for."""

    stopped = False
    stopped_by = None

    def __init__(self, word: Callable[[int], str]) -> None:
        self.push = word

    def finish(self) -> str:
        """Nothing was held back."""
        return ""


class PlainTexts:
    """For a model whose tokenizer is not here: about four characters are a token.

    Its own words come back as the tokens that they were; any other text becomes tokens that stand for it, and cannot
    be turned back.
    """

    eos_id: int | None = None

    def __init__(self, vocab_size: int) -> None:
        syllables = [first + second for first, second in product("bdfgklmnprstvz", "aeiou")]
        words = [f" {first}{second}" for first, second in product(syllables, syllables)]
        self._words = words[: max(vocab_size // 2, 1)]
        self._ids = {word: token for token, word in enumerate(self._words)}
        self._others = max(vocab_size - len(self._words), 1)

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids of `text`."""
        return [self._token(piece) for piece in re.findall(r" [a-z]{4}(?![a-z])|.{1,4}", text, re.DOTALL)]

    def _token(self, piece: str) -> int:
        token = self._ids.get(piece)
        return len(self._words) + crc32(piece.encode()) % self._others if token is None else token

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Text of `ids`; a token that stands for other text is a dot."""
        return "".join(self.names(ids))

    def names(self, ids: Sequence[int]) -> list[str]:
        """The text of each."""
        return [self._words[token] if token < len(self._words) else " ." for token in ids]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        special: bool = False,
        more: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, as a template might write it that makes nothing of `more`."""
        turns = [f"<{message['role']}>{message['content']}\n" for message in messages]
        if continue_final_message:
            turns[-1] = turns[-1].removesuffix("\n")
        asks = ["<assistant>"] if add_generation_prompt else []
        return self.encode("".join([*([repr(tools)] if tools else []), *turns, *asks]))
