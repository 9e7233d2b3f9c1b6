"""The likelihood of a token, beside others that could have come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Logprob(NamedTuple):
    """The natural logarithm of a token's probability by the model, before temperature and limits.

    `top` are the likeliest tokens, the likeliest first, each with its own.
    """

    logprob: float
    top: Sequence[tuple[int, float]] = ()
