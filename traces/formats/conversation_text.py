"""The text of a conversation as tokens, with keys of its blocks, so that equal texts are equal prefixes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from tokentwin.traces.formats.rows import Row
from tokentwin.traces.formats.sessions import Assumed, Turn

BLOCK_TOKENS = 16  # vLLM's block, so that a shared text is shared as an engine would share it
_CHARACTERS = 4  # characters of a token, about, in English text (https://help.openai.com/en/articles/4936856)

Encode = Callable[[str], Sequence[Hashable]]


def encoder(assumed: Assumed) -> tuple[Encode, list[str]]:
    """Return the function that makes tokens of a text, and a caution if each token has four characters."""
    if assumed.tokenizer is not None:
        return assumed.tokenizer, []
    return _pieces, ["four characters count as a token; trace convert --tokenizer counts exactly"]


def _pieces(text: str) -> list[str]:
    return [text[at : at + _CHARACTERS] for at in range(0, len(text), _CHARACTERS)]


class ConversationText:
    """The tokens of a conversation so far. A chat template's own tokens are not counted.

    Attributes:
        length: number of tokens
    """

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self.length = 0
        self._keys: list[Hashable] = []
        self._rest: list[Hashable] = []  # tokens after the last whole block

    def add(self, text: str) -> int:
        """Add a text, and return its number of tokens."""
        tokens = self._encode(text)
        self.length += len(tokens)
        self._rest += tokens
        while len(self._rest) >= BLOCK_TOKENS:
            before = self._keys[-1] if self._keys else 0
            self._keys.append(hash((before, *self._rest[:BLOCK_TOKENS])))
            del self._rest[:BLOCK_TOKENS]
        return len(tokens)

    def turn(self, output: int | None, arrival_ns: int | None = None, think_ns: int | None = None) -> Turn:
        """Return a turn whose prompt is the conversation so far."""
        return Turn(output, self.length, arrival_ns=arrival_ns, think_ns=think_ns, keys=tuple(self._keys))


def content_text(row: Row, field: str, content: Any) -> str:
    """Return a message's text: a string, or a list of parts of which those of type `text` count; None is empty."""
    if content is None:
        return ""
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return "\n".join(text for text in texts if isinstance(text, str))
    if not isinstance(content, str):
        raise row.error(field, content, "must be a text")
    return content
