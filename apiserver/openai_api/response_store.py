"""The last answers of the Responses API, which clients may read again and continue.

vLLM stores every answer for ever, if it is asked to store at all. Here the number and the size are limited, and the
oldest answers go first.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any, NamedTuple

from tokentwin.apiserver.openai_api.refusal import Refusal

_MOST_BYTES = 64 << 20  # of all stored answers together


class Stored(NamedTuple):
    """An answer as JSON, and as JSON the items of its conversation: all that was asked and answered up to it."""

    document: bytes
    items: bytes

    @property
    def size(self) -> int:
        return len(self.document) + len(self.items)


class ResponseStore:
    """Up to `most` answers, by their ids."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: OrderedDict[str, Stored] = OrderedDict()
        self._size = 0

    def keep(self, items: list[dict[str, Any]], document: dict[str, Any]) -> None:
        """Store an answer that has ended, and the items that it answers."""
        stored = Stored(json.dumps(document).encode(), json.dumps([*items, *document["output"]]).encode())
        self._drop(document["id"])  # a client may choose the id
        self._kept[document["id"]] = stored
        self._size += stored.size
        while len(self._kept) > self.most or self._size > _MOST_BYTES:
            self._drop(next(iter(self._kept)))

    def _drop(self, id: str) -> None:
        if (stored := self._kept.pop(id, None)) is not None:
            self._size -= stored.size

    def get(self, id: str) -> Stored:
        """Return a stored answer. Raises Refusal if there is none with this id."""
        if (stored := self._kept.get(id)) is None:
            raise Refusal(404, f"Response with id {id[:200]!r} not found", "response_id")
        return stored
