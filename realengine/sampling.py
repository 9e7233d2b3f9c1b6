"""The choice of tokens from logits, by rules, temperature, top-k and top-p, with a seed for each request.

A request's draws depend on its seed and on its number of output tokens, never on the rest of the batch. The uniform
number of a draw is a hash of these two, so no generator carries state from row to row. The order and meaning of the
limits are the same as in vLLM: temperature, then top-k, then top-p of the tokens that top-k keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import torch

from tokentwin.realengine.logit_rules import Logprob, StepChanges
from tokentwin.serving.errors import UserError

_GREEDY_BELOW = 1e-5  # vLLM's limit: a smaller temperature counts as 0
MOST_LOGPROBS = 20  # maximum number of alternatives whose log-probabilities a request may want
_HEAD = 512  # number of likeliest tokens that nearly always contain the top-p tokens


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The settings for drawing a token. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 keep every token.

    Without a seed the request's id is the seed: requests differ, and a repeated run gives the same tokens.
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

    def draw(self, step: int, name: str = "") -> tuple[float, int, float, float] | None:
        """Return temperature, top-k, top-p and the uniform number for output token `step`; None if greedy.

        `name` selects another uniform number for the same token.
        """
        return None if self.greedy else (self.temperature, self.top_k, self.top_p, self.uniform(step, name))

    def uniform(self, step: int, name: str = "") -> float:
        """Return the uniform number for output token `step`; `name` selects another number for the same token."""
        return uniform(self.seed or 0, step, name)

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the float64 probabilities `[vocab]` of drawing each token from `logits` `[vocab]`; not for greedy."""
        kept = _kept(logits.float(), self.temperature, self.top_k, self.top_p).double()
        return kept / kept.sum()


def draw(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """Return one token id, int32, for each row of `logits` `[rows, vocab]`; the other arguments are `[rows]`.

    Top-k keeps every logit not below the k-th largest. Of those, top-p keeps the tokens whose probability reaches a
    threshold: the largest threshold for which the kept tokens have a total probability of at least `top_p`. The token
    is the first, in vocabulary order, at which the cumulative probability of the kept tokens exceeds the share
    `uniform` of their total. No result depends on the order of equal logits.
    """
    tokens = logits.argmax(-1)
    how = zip(temperature.tolist(), top_k.tolist(), top_p.tolist(), uniform.tolist(), strict=True)
    for row, (heat, k, p, u) in enumerate(how):
        if heat >= _GREEDY_BELOW:
            tokens[row] = _draw(logits[row].float(), heat, k, p, u)
    return tokens.int()


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities, float32.

    `chosen` `[S]` are those of the chosen tokens, and `top` `[S, K]` those of the likeliest tokens. `top_tokens` `[S,
    K]` int32 are the ids of the likeliest tokens.
    """

    chosen: torch.Tensor
    top: torch.Tensor
    top_tokens: torch.Tensor

    def to_host(self, buffers: Sequence[torch.Tensor]) -> TokenLogprobs:
        """Copy the logprobs to the host, into flat int32 `buffers`, one for each field, and return them there.

        They are valid once the device has copied them.
        """
        fields = []
        for buffer, its in zip(buffers, self, strict=True):
            fields.append(buffer.view(its.dtype)[: its.numel()].view(its.shape).copy_(its, non_blocking=True))
        return TokenLogprobs(*fields)

    def on_host(self) -> list[Logprob]:
        """Return one `Logprob` for each sample."""
        top = zip(self.top_tokens.tolist(), self.top.tolist(), strict=True)
        likeliest = [list(zip(tokens, logprobs, strict=True)) for tokens, logprobs in top]
        return list(map(Logprob, self.chosen.tolist(), likeliest))


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor, top: int = 0) -> TokenLogprobs:
    """Return the logprob of each of `tokens` `[S]` by `logits` `[S, vocab]`, and those of the `top` likeliest tokens.

    They are the same as vLLM's default, `raw_logprobs`: before penalties, temperature, top-k and top-p.
    """
    numbers = logits.float()
    whole = numbers.logsumexp(-1)
    chosen = numbers.gather(1, tokens.long().unsqueeze(1)).squeeze(1) - whole
    likeliest = numbers.topk(min(top, numbers.shape[1]))
    return TokenLogprobs(chosen, likeliest.values - whole.unsqueeze(1), likeliest.indices.int())


def _draw(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, uniform: float) -> torch.Tensor:
    """Draw a token from one row of `logits` by inverse-CDF sampling."""
    return pick(_kept(logits, temperature, top_k, top_p), uniform)


def pick(weights: torch.Tensor, uniform: float) -> torch.Tensor:
    """Return the first token at which the cumulative sum of `weights` `[vocab]` exceeds `uniform` times their sum."""
    cumulative = weights.double().cumsum(-1)
    drawn = torch.searchsorted(cumulative, cumulative[-1] * uniform, right=True)
    return drawn.clamp(max=len(weights) - 1)


def _kept(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """Return the probabilities `[vocab]` of all tokens, with 0 for tokens that top-k or top-p exclude."""
    scaled = (logits - logits.max()) / temperature
    if 0 < top_k < len(scaled):
        kth = scaled.topk(top_k).values[-1]
        scaled = torch.where(scaled < kth, -torch.inf, scaled)
    probabilities = torch.softmax(scaled, dim=-1)
    if top_p < 1:
        probabilities = torch.where(probabilities < _least_of_nucleus(probabilities, top_p), 0.0, probabilities)
    return probabilities


def _least_of_nucleus(probabilities: torch.Tensor, share: float) -> torch.Tensor:
    """Return the largest threshold for which the probabilities not below it sum to at least `share`.

    On the CPU it sorts only the likeliest tokens if they suffice, because sorting the whole vocabulary takes ten times
    as long. On a GPU the host would have to wait to learn whether they do.
    """
    if probabilities.device.type == "cpu":
        likeliest = probabilities.topk(min(_HEAD, len(probabilities))).values
        if likeliest.sum() < share:
            likeliest = probabilities.sort(descending=True).values
    else:
        likeliest = probabilities.sort(descending=True).values
    mass = likeliest.double().cumsum(-1)
    # `gather`, because an index that is a tensor without dimensions is read by the host
    return likeliest.gather(0, (mass < share).sum(0, keepdim=True).clamp(max=len(likeliest) - 1))


def uniform(seed: int, step: int, name: str = "") -> float:
    """Return a uniform number in [0, 1) for output token `step`: 24 bits of a hash, so it is exact in float32.

    `name` selects another number for the same token.
    """
    return UniformNumbers(seed)(step, name)


class UniformNumbers:
    """The uniform numbers of one seed, as `uniform` defines them, at half of its cost for each."""

    def __init__(self, seed: int) -> None:
        self._seeded = blake2b(f"{seed}:".encode(), digest_size=8)

    def __call__(self, step: int, name: str = "") -> float:
        hashed = self._seeded.copy()
        hashed.update(f"{step}{name}".encode())
        return (int.from_bytes(hashed.digest(), "little") >> 40) / 2**24


def changed_logits(logits: torch.Tensor, changes: StepChanges, last_tokens: torch.Tensor) -> torch.Tensor:
    """Return `logits` `[S, vocab]` in float32 after `changes`.

    `last_tokens` `[S]` is the last sampled token of each sample's request. If the changes would forbid every token of a
    sample, no token is forbidden.
    """
    on_device = [torch.from_numpy(part).to(logits.device) for part in changes]
    samples, numbers, unseen, limited, prompt, outputs, bias, biases, banned, allowed = on_device
    samples = samples.long()
    presence, frequency, repetition, floor = numbers.unsqueeze(2).unbind(1)
    last = last_tokens[samples].long()
    whole = logits.float()
    ruled = whole[samples]

    counts = torch.zeros_like(ruled)
    _add(counts, outputs[:, 0], outputs[:, 1], outputs[:, 2].float())
    counts.scatter_add_(1, last.unsqueeze(1), unseen.float().unsqueeze(1))
    seen = counts.clone()
    _add(seen, prompt[:, 0], prompt[:, 1], torch.ones_like(prompt[:, 0], dtype=torch.float32))

    _add(ruled, bias[:, 0], bias[:, 1], biases)
    repeated = torch.where(ruled > 0, ruled / repetition, ruled * repetition)
    ruled = torch.where(seen > 0, repeated, ruled)
    ruled -= frequency * counts
    ruled -= presence * (counts > 0)

    forbidden = torch.zeros_like(ruled)
    number, token, after = banned.unbind(1)
    _add(forbidden, number, token, ((after < 0) | (after == last[number.long()])).float())
    only = torch.zeros_like(ruled)
    _add(only, allowed[:, 0], allowed[:, 1], torch.ones_like(allowed[:, 0], dtype=torch.float32))
    left = ruled.masked_fill((forbidden > 0) | (limited.unsqueeze(1) & (only == 0)), -torch.inf)
    left = left.masked_fill(left < left.amax(1, keepdim=True) + floor, -torch.inf)
    nothing = (left == -torch.inf).all(1, keepdim=True)
    whole = whole.clone() if whole is logits else whole
    whole[samples] = torch.where(nothing, ruled, left)
    return whole


def _add(to: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, numbers: torch.Tensor) -> None:
    to.index_put_((rows.long(), tokens.long()), numbers, accumulate=True)
