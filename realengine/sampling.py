"""From logits to tokens: greedy, temperature, top-k, top-p, with a seed per request.

A request's draws depend on its seed and on how many tokens it has, never on the batch it is in: the uniform number
behind a draw is a hash of the two, so there is no generator whose state could leak from row to row. Order and meaning
of the limits are vLLM's: temperature, then top-k, then top-p of what top-k has left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch

from serving.errors import UserError

_GREEDY_BELOW = 1e-5  # a temperature under this cannot be told from 0 in float32; vLLM's limit
_HEAD = 512  # tokens that nearly always hold a nucleus


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw a token. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 keep every token.

    Without a seed a request draws by its id: requests differ, and the same run gives the same tokens.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError("temperature", self.temperature, "must be 0 (greedy) or a positive number")
        if self.top_k < 0:
            raise UserError("top_k", self.top_k, "must be 0 (off) or a positive number of tokens")
        if not 0 < self.top_p <= 1:
            raise UserError("top_p", self.top_p, "must be above 0 and at most 1")

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW


def sample(logits: torch.Tensor, params: Sequence[SamplingParams], steps: Sequence[int]) -> list[int]:
    """One token id for each row of `logits` `[rows, vocab]`; `steps[i]` counts row i's tokens so far."""
    tokens: list[int] = logits.argmax(-1).tolist()
    for row, (how, step) in enumerate(zip(params, steps, strict=True)):
        if not how.greedy:
            tokens[row] = _draw(logits[row].float(), how, step)
    return tokens


def _draw(logits: torch.Tensor, how: SamplingParams, step: int) -> int:
    """Inverse-CDF sampling of one row of `logits`."""
    scaled = (logits - logits.max()) / how.temperature
    ids = None
    if 0 < how.top_k < len(scaled):
        scaled, ids = scaled.topk(how.top_k)
    probabilities = torch.softmax(scaled, dim=-1)
    if how.top_p < 1 and ids is None:
        probabilities, ids = _likeliest(probabilities, how.top_p)
    cumulative = probabilities.double().cumsum(-1)
    if how.top_p < 1:  # as few of the likeliest tokens as reach top_p
        cumulative = cumulative[: int((cumulative < how.top_p).sum()) + 1]
    drawn = torch.searchsorted(cumulative, cumulative[-1] * _uniform(how.seed or 0, step), right=True)
    return int(drawn if ids is None else ids[drawn])


def _likeliest(probabilities: torch.Tensor, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Enough tokens, likeliest first, to reach `share`. Sorting a whole vocabulary costs ten times a top-k."""
    first, ids = probabilities.topk(min(_HEAD, len(probabilities)))
    if first.sum() > share:
        return first, ids
    ordered, ids = probabilities.sort(descending=True)
    return ordered, ids


def _uniform(seed: int, step: int) -> float:
    """A number in [0, 1) from 52 bits of a hash: below 1 by enough that a product with it stays below its factor."""
    digest = blake2b(f"{seed}:{step}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 12) / 2**52
