"""The token ids of vLLM's requests, for our prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class RequestTokens:
    """A vLLM request in the form that our prefix cache reads."""

    def __init__(self, request: Any) -> None:
        self.request = request
        self.salt: str = getattr(request, "cache_salt", None) or ""

    @property
    def tokens(self) -> Sequence[int]:
        return self.request.all_token_ids
