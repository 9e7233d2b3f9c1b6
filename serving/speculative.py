"""Speculative decoding: how many tokens a draft proposes, and how many of them the target model accepts.

Nothing here sees a token. Whether a draft token is accepted is a coin that belongs to its place in the output of its
request, tossed from (seed, request, place): whatever is batched with it, and whoever schedules it, it falls the same
way. Acceptance is that of Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (ICML 2023).
"""

from __future__ import annotations

from hashlib import blake2b
from itertools import pairwise
from typing import Literal

from pydantic import Field, model_validator

from serving.settings import Settings

_COIN = 1 << 64


class SpeculativeConfig(Settings):
    """What drafts, how far ahead, how well and at what cost; names are those of vLLM's `--speculative-config`.

    A draft model is timed by the kernels of the deployment's GPU. What else drafts has a stated cost per pass: `eagle`
    (a head on the target's last layer, MTP alike) makes a pass for each draft token, `ngram` one a step.
    """

    method: Literal["draft_model", "eagle", "ngram"] = Field(
        "draft_model", description="what proposes the draft tokens"
    )
    num_speculative_tokens: int = Field(ge=1, le=64, description="draft tokens that a request verifies in one step")
    acceptance_rate: float | None = Field(
        None, ge=0, le=1, description="probability that a draft token is accepted if all before it were"
    )
    synthetic_acceptance_rates: tuple[float, ...] | None = Field(
        None,
        description="instead of acceptance_rate, the share of drafts accepted up to each position: in vLLM, "
        "spec_decode_num_accepted_tokens_per_pos over spec_decode_num_drafts",
    )
    seed: int = Field(0, description="seed of the acceptances")
    model: str | None = Field(None, description="draft_model: the draft model, named like the deployment's model")
    draft_step_share: float | None = Field(
        None, ge=0, le=10, description="eagle, ngram: time of a drafting pass as a share of the step before it"
    )
    draft_us: float | None = Field(
        None, ge=0, le=1e7, description="eagle, ngram: microseconds of a drafting pass, instead of draft_step_share"
    )

    @model_validator(mode="after")
    def _acceptance_is_given_once(self) -> SpeculativeConfig:
        rates = self.synthetic_acceptance_rates
        if (self.acceptance_rate is None) == (rates is None):
            raise ValueError("give either acceptance_rate or synthetic_acceptance_rates")
        if rates is not None:
            if len(rates) != self.num_speculative_tokens:
                raise ValueError("synthetic_acceptance_rates must hold num_speculative_tokens shares")
            if any(not 0 <= rate <= before for before, rate in zip((1.0, *rates), rates, strict=False)):
                raise ValueError("synthetic_acceptance_rates must be shares, none larger than the one before it")
        return self

    @model_validator(mode="after")
    def _cost_fits_the_method(self) -> SpeculativeConfig:
        stated = [cost for cost in (self.draft_step_share, self.draft_us) if cost is not None]
        if self.method == "draft_model" and (self.model is None or stated):
            raise ValueError("method draft_model needs model; leave draft_step_share and draft_us out")
        if self.method != "draft_model" and (self.model is not None or len(stated) != 1):
            raise ValueError(f"method {self.method} needs either draft_step_share or draft_us; leave model out")
        return self

    @property
    def num_lookahead_tokens(self) -> int:
        """Tokens beyond those of its step that a request holds KV blocks for, since whoever drafts writes KV too."""
        return 0 if self.method == "ngram" else self.num_speculative_tokens

    @property
    def conditional_rates(self) -> tuple[float, ...]:
        """For each place in a draft, the probability of acceptance, given that those before it were accepted."""
        if self.acceptance_rate is not None:
            return (self.acceptance_rate,) * self.num_speculative_tokens
        assert self.synthetic_acceptance_rates is not None
        shares = (1.0, *self.synthetic_acceptance_rates)
        return tuple(share / before if before else 0.0 for before, share in pairwise(shares))


class Acceptance:
    """Tosses the coins of one configuration."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._seed = str(config.seed).encode()
        self._below = [round(rate * _COIN) for rate in config.conditional_rates]

    def accepted(self, request: int, place: int, drafts: int) -> int:
        """How many of `drafts` tokens are accepted, the first of which would be output token `place`, from 0."""
        for index in range(drafts):
            if self._coin(request, place + index) >= self._below[index]:
                return index
        return drafts

    def _coin(self, request: int, place: int) -> int:
        """Uniform in [0, 2^64)."""
        tossed = blake2b(b"%d:%d" % (request, place), digest_size=8, key=self._seed[-64:])
        return int.from_bytes(tossed.digest(), "big")
