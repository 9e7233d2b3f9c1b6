"""The choice of tokens from logits: rules, greedy, temperature, top-k, top-p, with a seed per request.

A request's draws depend on its seed and on how many tokens it has, never on the batch that it is in: the uniform number
behind a draw is a hash of the two, so there is no generator whose state could leak from row to row. Order and meaning
of the limits are vLLM's: temperature, then top-k, then top-p of the tokens that top-k has left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import torch

from realengine.logit_rules import Logprob, StepChanges
from serving.errors import UserError

_GREEDY_BELOW = 1e-5  # vLLM's limit: a smaller temperature cannot be told from 0 in float32
MOST_LOGPROBS = 20  # tokens beside the chosen one whose log-probabilities may be wanted
_HEAD = 512  # tokens that nearly always contain a nucleus


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The settings for drawing a token. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 keep every token.

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

    def draw(self, step: int, name: str = "") -> tuple[float, int, float, float] | None:
        """Return temperature, top-k, top-p and the uniform number for token number `step`; None for greedy.

        `name` names another uniform number of the token.
        """
        return None if self.greedy else (self.temperature, self.top_k, self.top_p, self.uniform(step, name))

    def uniform(self, step: int, name: str = "") -> float:
        """Return the uniform number behind token number `step`, or another one, called `name`."""
        return uniform(self.seed or 0, step, name)

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Return each token's probability of being drawn, float64 `[vocab]`, by `logits` `[vocab]`; not for greedy."""
        kept = _kept(logits.float(), self.temperature, self.top_k, self.top_p).double()
        return kept / kept.sum()


def draw(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """Return one token id, int32, for each row of `logits` `[rows, vocab]`; the other arguments are `[rows]`.

    Top-k keeps every logit not below the k-th largest. Of those, top-p keeps every probability not below the largest
    that at least `top_p` lies at or above. The token is the first, in vocabulary order, at which the cumulative
    probability of the kept tokens exceeds `uniform` of the whole. No step depends on how ties would be sorted.
    """
    tokens = logits.argmax(-1)
    how = zip(temperature.tolist(), top_k.tolist(), top_p.tolist(), uniform.tolist(), strict=True)
    for row, (heat, k, p, u) in enumerate(how):
        if heat >= _GREEDY_BELOW:
            tokens[row] = _draw(logits[row].float(), heat, k, p, u)
    return tokens.int()


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities, float32.

    There is one for each of the `chosen` tokens `[S]`, and one for each of the likeliest `[S, K]`, whose ids, int32,
    are `top_tokens`.
    """

    chosen: torch.Tensor
    top: torch.Tensor
    top_tokens: torch.Tensor

    def to_host(self, buffers: Sequence[torch.Tensor]) -> TokenLogprobs:
        """Return the logprobs on the host, in flat int32 `buffers`, one for each field.

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
    """Return the logprob of each of `tokens` `[S]` under `logits` `[S, vocab]`, beside the likeliest `top`.

    They are vLLM's `raw_logprobs`, its default: before penalties, temperature, top-k and top-p.
    """
    numbers = logits.float()
    whole = numbers.logsumexp(-1)
    chosen = numbers.gather(1, tokens.long().unsqueeze(1)).squeeze(1) - whole
    likeliest = numbers.topk(min(top, numbers.shape[1]))
    return TokenLogprobs(chosen, likeliest.values - whole.unsqueeze(1), likeliest.indices.int())


def _draw(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, uniform: float) -> torch.Tensor:
    """Return a token of one row of `logits` by inverse-CDF sampling."""
    return pick(_kept(logits, temperature, top_k, top_p), uniform)


def pick(weights: torch.Tensor, uniform: float) -> torch.Tensor:
    """Return the first token at which the cumulative sum of `weights` `[vocab]` exceeds `uniform` of the whole."""
    cumulative = weights.double().cumsum(-1)
    drawn = torch.searchsorted(cumulative, cumulative[-1] * uniform, right=True)
    return drawn.clamp(max=len(weights) - 1)


def _kept(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """Return the probabilities `[vocab]` of all tokens, 0 for tokens beyond the limits."""
    scaled = (logits - logits.max()) / temperature
    if 0 < top_k < len(scaled):
        kth = scaled.topk(top_k).values[-1]
        scaled = torch.where(scaled < kth, -torch.inf, scaled)
    probabilities = torch.softmax(scaled, dim=-1)
    if top_p < 1:
        probabilities = torch.where(probabilities < _least_of_nucleus(probabilities, top_p), 0.0, probabilities)
    return probabilities


def _least_of_nucleus(probabilities: torch.Tensor, share: float) -> torch.Tensor:
    """Return the largest probability that at least `share` lies at or above.

    Sorting everything costs ten times a top-k.
    """
    likeliest = probabilities.topk(min(_HEAD, len(probabilities))).values
    if likeliest.sum() < share:
        likeliest = probabilities.sort(descending=True).values
    mass = likeliest.double().cumsum(-1)
    return likeliest[(mass < share).sum().clamp(max=len(likeliest) - 1)]


def uniform(seed: int, step: int, name: str = "") -> float:
    """Return a number in [0, 1) from 24 bits of a hash, exact in float32, for a request's token number `step`.

    `name` names another number of that token.
    """
    digest = blake2b(f"{seed}:{step}{name}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 40) / 2**24


def changed_logits(logits: torch.Tensor, changes: StepChanges, last_tokens: torch.Tensor) -> torch.Tensor:
    """Return `logits` `[S, vocab]` in float32 with `changes`.

    `last_tokens` `[S]` are the last sampled tokens of each sample's request. If every token would be forbidden, none
    is.
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
