"""Text without a model: the words of a twin's answers, and a tokenizer for models whose own is missing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, Protocol
from zlib import crc32

from tokentwin.serving.errors import UserError

_WORDS = 512
_BYTES = 256


class Texts(Protocol):
    """A tokenizer, which converts text to token ids and back, and chats to prompts.

    `eos_id` is the end-of-sequence token; None if not known. `longest` is the largest number of characters of a token.
    `template` is the source of the chat template; empty without one.
    If `special`, `encode` adds special tokens, and `decode` keeps them. `chat_text` returns a prompt, and the value of
    `special` for its tokens.
    """

    @property
    def eos_id(self) -> int | None: ...
    @property
    def longest(self) -> int: ...
    @property
    def template(self) -> str: ...
    def encode(self, text: str, special: bool = False) -> list[int]: ...
    def decode(self, ids: Sequence[int], special: bool = False) -> str: ...
    def names(self, ids: Sequence[int]) -> list[str]: ...
    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        special: bool = False,
        more: Mapping[str, Any] | None = None,
    ) -> tuple[str, bool]: ...


def filler_tokens(texts: Texts, vocab_size: int) -> list[int]:
    """Return up to 512 tokens, each of which is a whole word that encodes to this single token.

    If no token is a word, the tokens are parts of words. Raises UserError if the tokenizer has no such token either.
    """
    for form in (r" [a-z]{3,}", r" ?[a-z]+"):
        words = []
        for token in range(vocab_size):
            text = texts.decode([token])
            if re.fullmatch(form, text) and texts.encode(text) == [token]:
                words.append(token)
                if len(words) == _WORDS:
                    break
        if words:
            return words
    raise UserError("tokenizer", None, "has no token of letters alone; name another tokenizer")


class Words:
    """A `Detokenizer` without stop strings, for tokens each of which is a complete text."""

    stopped = False
    stopped_by = None

    def __init__(self, word: Callable[[int], str]) -> None:
        self.push = word

    def finish(self) -> str:
        """Return an empty text, because `push` holds no text back."""
        return ""


class PlainTexts:
    """A tokenizer for a model whose own is not on this machine; a token is about four characters.

    The tokenizer's own words decode to themselves. Any other text becomes tokens that cannot be decoded. The last 256
    tokens of a large vocabulary are bytes; only structured answers have them.
    """

    eos_id: int | None = None
    template = ""
    longest = 5  # a space and four letters

    def __init__(self, vocab_size: int) -> None:
        syllables = [first + second for first, second in product("bdfgklmnprstvz", "aeiou")]
        words = [f" {first}{second}" for first, second in product(syllables, syllables)]
        self._words = words[: max(vocab_size // 2, 1)]
        self._ids = {word: token for token, word in enumerate(self._words)}
        self._first_byte = vocab_size - _BYTES if vocab_size > 2 * _BYTES else vocab_size
        self._others = max(self._first_byte - len(self._words), 1)

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return the token ids of `text`."""
        return [self._token(piece) for piece in re.findall(r" [a-z]{4}(?![a-z])|.{1,4}", text, re.DOTALL)]

    def _token(self, piece: str) -> int:
        token = self._ids.get(piece)
        return len(self._words) + crc32(piece.encode()) % self._others if token is None else token

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Return the text of `ids`; a token that is no word of this tokenizer becomes a dot."""
        return b"".join(map(self._bytes, ids)).decode("utf-8", "replace")

    def names(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token."""
        return [self.decode([token]) for token in ids]

    def spelling(self) -> dict[int, bytes]:
        """Return the tokens that are bytes, in the order of the bytes, and then the words, each with its text."""
        tokens = [*range(self._first_byte, self._first_byte + _BYTES), *range(len(self._words))]
        return {token: self._bytes(token) for token in tokens}

    def _bytes(self, token: int) -> bytes:
        if token >= self._first_byte:
            return bytes([(token - self._first_byte) % _BYTES])
        return self._words[token].encode() if token < len(self._words) else b" ."

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        special: bool = False,
        more: Mapping[str, Any] | None = None,
    ) -> tuple[str, bool]:
        """Return a conversation, written by a simple chat template that ignores `more`."""
        turns = [f"<{message['role']}>{message['content']}\n" for message in messages]
        if continue_final_message:
            turns[-1] = turns[-1].removesuffix("\n")
        asks = ["<assistant>"] if add_generation_prompt else []
        return "".join([*([repr(tools)] if tools else []), *turns, *asks]), special
