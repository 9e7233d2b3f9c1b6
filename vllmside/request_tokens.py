"""The token ids of vLLM's requests, for our prefix cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tokentwin.serving.kv.content import TokenContent
from tokentwin.serving.request import Request


class RequestTokens:
    """A vLLM request in the form that our prefix cache reads."""

    def __init__(self, request: Any) -> None:
        self.request = request
        salt = getattr(request, "cache_salt", None)
        self.salt = salt.encode() if salt else b""

    @property
    def tokens(self) -> Sequence[int]:
        return self.request.all_token_ids


class SaltedContent(TokenContent):
    """Contents of KV blocks from token ids and salts.

    As in vLLM, the first block of a request with a `cache_salt` includes the salt. Requests therefore share prefixes
    only if they have the same salt.
    """

    def blocks(self, request: Request, first: int, last: int) -> Iterator[bytes]:
        salt = self._sequences[request.id].salt  # type: ignore[attr-defined]
        for index, block in enumerate(super().blocks(request, first, last), first):
            yield salt + block if salt and index == 0 else block
