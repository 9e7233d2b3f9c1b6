"""Text as it is generated: never half a character, never past a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"
_LONGEST_TAIL = 3  # bytes of an unfinished UTF-8 character; each may decode to one replacement character


class Detokenizer:
    """Takes tokens one by one and gives text as soon as it is certain.

    Text that ends in half a character, or that may be the beginning of a stop string, is held back. When a stop
    string is complete, `stopped` is true and the text ends before it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self.stopped = False
        self._decode = decode
        self._stop = [text for text in stop if text]
        self._context: list[int] = []  # tokens up to a character boundary: decoding may depend on the neighbour
        self._pending: list[int] = []  # tokens since
        self._given = 0  # characters of the pending tokens that were given already
        self._held = ""  # text that may be the beginning of a stop string

    def push(self, token: int) -> str:
        """The text that has become certain with `token`."""
        if self.stopped:
            return ""
        self._pending.append(token)
        text = self._decode([*self._context, *self._pending])[len(self._decode(self._context)) :]
        whole = _whole(text)
        certain, self._given = whole[self._given :], len(whole)
        if whole == text:
            self._context, self._pending, self._given = self._pending, [], 0
        return self._release(certain)

    def finish(self) -> str:
        """What was held back as a possible stop string, when no more tokens come. Half a character is dropped."""
        held, self._held = self._held, ""
        return "" if self.stopped else held

    def _release(self, text: str) -> str:
        text = self._held + text
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def _whole(text: str) -> str:
    """`text` without the character that may be unfinished at its end."""
    tail = len(text) - len(text.rstrip(_INCOMPLETE))
    return text[: len(text) - min(tail, _LONGEST_TAIL)]
