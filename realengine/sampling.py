"""From logits to tokens: greedy, temperature, top-k, top-p, with a seed per request.

A request's draws depend on its seed and on how many tokens it has, never on the batch it is in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch

from serving.errors import UserError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw a token. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 keep every token."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError("temperature", self.temperature, "must be 0 (greedy) or a positive number")
        if self.top_k < 0:
            raise UserError("top_k", self.top_k, "must be 0 (off) or a positive number of tokens")
        if not 0 < self.top_p <= 1:
            raise UserError("top_p", self.top_p, "must be above 0 and at most 1")


def sample(logits: torch.Tensor, params: Sequence[SamplingParams], steps: Sequence[int]) -> list[int]:
    """One token id for each row of `logits` `[rows, vocab]`; `steps[i]` counts row i's tokens so far."""
    tokens: list[int] = logits.argmax(-1).tolist()
    for row, (how, step) in enumerate(zip(params, steps, strict=True)):
        if how.temperature > 0:
            tokens[row] = _draw(logits[row].float(), how, step)
    return tokens


def _draw(logits: torch.Tensor, how: SamplingParams, step: int) -> int:
    probabilities, ids = torch.sort(torch.softmax(logits / how.temperature, dim=-1), descending=True, stable=True)
    if how.top_k:
        probabilities = probabilities[: how.top_k]
    if how.top_p < 1:
        before = probabilities.cumsum(-1) - probabilities  # the first token always stays
        probabilities = probabilities[before < how.top_p * 1.0]
    seed = int.from_bytes(blake2b(f"{how.seed}:{step}".encode(), digest_size=8).digest(), "little") >> 1
    generator = torch.Generator(device="cpu").manual_seed(seed)
    chosen = torch.multinomial(probabilities.cpu(), 1, generator=generator)
    return int(ids[int(chosen)])
