"""Text as it is generated: never half a character, never past a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"


class Detokenizer:
    """A decoder that takes tokens one by one and gives text as soon as it is certain.

    Text that may end in half a character, or may be the beginning of a stop string, is held back. When a stop string is
    complete, `stopped_by` names it and the text ends before it or, if it is to be kept, after it. Of several stop
    strings the first complete one counts, however the text was cut into tokens. The first `min_tokens` tokens complete
    none. All pieces together are the decoded whole without half a character at its end.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str] = (),
        keeps_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self.stopped_by: str | None = None
        self._decode = decode
        self._stop = [text for text in stop if text]
        self._keeps_stop = keeps_stop
        self._unstoppable = min_tokens  # tokens that cannot complete a stop string
        self._context: list[int] = []  # tokens up to a character boundary: decoding may depend on the neighbour
        self._pending: list[int] = []  # tokens after the boundary
        self._given = 0  # characters of the pending tokens that were already given
        self._withheld = ""  # text that may be the beginning of a stop string

    @property
    def stopped(self) -> bool:
        """True if a stop string is complete."""
        return self.stopped_by is not None

    def push(self, token: int) -> str:
        """Return the text that has become certain with `token`."""
        if self.stopped:
            return ""
        self._unstoppable -= 1
        self._pending.append(token)
        text = self._decode_pending()
        # One unfinished character can turn its finished neighbours into U+FFFD too (byte-fallback vocabularies). So
        # while there is one at the end, nothing from the first U+FFFD on is certain.
        whole = text[: text.index(_INCOMPLETE)] if text.endswith(_INCOMPLETE) else text
        certain, self._given = whole[self._given :], len(whole)
        if whole == text:
            self._context = self._pending if text else [*self._context, *self._pending]
            self._pending, self._given = [], 0
        return self._release(certain)

    def finish(self) -> str:
        """Return the text that was held back, when no more tokens come. Half a character is dropped."""
        if self.stopped:
            return ""
        text = self._release(self._decode_pending().rstrip(_INCOMPLETE)[self._given :]) + self._withheld
        self._pending, self._given, self._withheld = [], 0, ""
        return text

    def _decode_pending(self) -> str:
        return self._decode([*self._context, *self._pending])[len(self._decode(self._context)) :]

    def _release(self, text: str) -> str:
        text = self._withheld + text
        complete = [(text.index(stop) + len(stop), text.index(stop), stop) for stop in self._stop if stop in text]
        if complete and self._unstoppable < 0:
            ends, begins, self.stopped_by = min(complete)
            self._withheld = ""
            return text[: ends if self._keeps_stop else begins]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._withheld = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
