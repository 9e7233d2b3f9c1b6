"""Speculative decoding: how many tokens a draft proposes, and how many of them the target model accepts.

The scheduler asks an `Acceptance` and sees no tokens. The real engine decides from its tokens. On the virtual clock,
random numbers ("coins") decide. The coin of a draft token depends only on the seed, the request and the token's place
in the request's output. So a draft token has the same outcome in any batch and under any scheduler. Acceptance is
defined as in Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (ICML 2023).
"""

from __future__ import annotations

from hashlib import blake2b
from itertools import accumulate, pairwise
from operator import mul
from typing import Literal, Protocol, Self

from pydantic import Field, model_validator

from tokentwin.serving.errors import UserError
from tokentwin.serving.request import Request
from tokentwin.serving.settings import Settings, TerseSettings

_COIN = 1 << 64
_NGRAM = 5  # tokens: vLLM's default


class DraftRates(Settings):
    """Proposal and acceptance rates of the steps that follow a step with a certain result."""

    proposal_rates: tuple[float, ...] = Field(
        description="proposal rates of these steps, in the form of the setting proposal_rates"
    )
    synthetic_acceptance_rates: tuple[float, ...] = Field(
        description="acceptance rates of these steps, in the form of the setting synthetic_acceptance_rates"
    )


class SpeculativeConfig(TerseSettings):
    """The method, length, acceptance and cost of drafts; names are those of vLLM's `--speculative-config`.

    Acceptance and costs are for the simulator; on the real engine they follow from the run. On a GPU that was not
    measured, the time of a draft model comes from the times of its kernels. So does the time of `mtp`, the target
    model's own layer for multi-token prediction. Other methods have a stated cost per pass: `eagle` (a head on the
    target's last layer) makes a pass for each draft token, `ngram` makes one pass per step.
    """

    seldom_set = ("rates_after",)

    method: Literal["draft_model", "eagle", "mtp", "ngram"] = Field(
        "draft_model", description="method that proposes draft tokens"
    )
    num_speculative_tokens: int = Field(
        ge=1, le=64, description="number of draft tokens that one step verifies for each request"
    )
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] | None = Field(
        None,
        min_length=1,
        description="ranges of batch sizes with their number of draft tokens, such as [[1, 16, 3], [17, 64, 1]]: a "
        "step with that many requests drafts so many tokens; larger steps draft as the last range; null: always "
        "num_speculative_tokens",
    )
    acceptance_rate: float | None = Field(
        None,
        ge=0,
        le=1,
        description="probability that a draft token is accepted, if all draft tokens before it were accepted",
    )
    synthetic_acceptance_rates: tuple[float, ...] | None = Field(
        None,
        description="for each position, fraction of drafts whose tokens are accepted up to there, instead of "
        "acceptance_rate. In vLLM: spec_decode_num_accepted_tokens_per_pos over spec_decode_num_drafts",
    )
    proposal_rates: tuple[float, ...] | None = Field(
        None,
        description="for each position, fraction of steps in which a decoding request has a draft that long; null: all",
    )
    rates_after: tuple[DraftRates, DraftRates, DraftRates, DraftRates] | None = Field(
        None,
        description="recorded rates for four cases: no draft of the request was accepted so far, or its previous step "
        "accepted none, some or all of num_speculative_tokens; null: the same rates in all steps",
    )
    seed: int = Field(0, description="seed of the random acceptances")
    model: str | None = Field(None, description="draft_model: the draft model, named like the deployment's model")
    draft_sample_method: Literal["coupled", "probabilistic"] = Field(
        "coupled",
        description="draft_model on the real engine, at temperatures above 0. coupled: draw draft tokens with the "
        "target's random numbers; outputs do not change. probabilistic: more drafts are accepted, but the output of a "
        "seed depends on the drafts",
    )
    prompt_lookup_max: int | None = Field(
        None, ge=1, le=64, description="ngram: maximum number of last tokens to look up in the earlier text"
    )
    prompt_lookup_min: int | None = Field(
        None, ge=1, le=64, description="ngram: minimum number of last tokens to look up in the earlier text"
    )
    draft_step_share: float | None = Field(
        None,
        ge=0,
        le=10,
        description="eagle, ngram: time of a drafting pass, as a fraction of the time of the previous step",
    )
    draft_us: float | None = Field(
        None,
        ge=0,
        le=1e7,
        description="eagle, ngram: time of a drafting pass in microseconds, instead of draft_step_share",
    )

    @model_validator(mode="after")
    def _acceptance_is_given_once(self) -> Self:
        if self.acceptance_rate is not None and self.synthetic_acceptance_rates is not None:
            raise ValueError("give either acceptance_rate or synthetic_acceptance_rates")
        names = ("synthetic_acceptance_rates", "proposal_rates")
        for name, rates in ((name, getattr(one, name)) for one in (self, *(self.rates_after or ())) for name in names):
            if rates is None:
                continue
            if len(rates) != self.num_speculative_tokens:
                raise ValueError(f"{name} must have num_speculative_tokens shares")
            if any(not 0 <= rate <= before for before, rate in zip((1.0, *rates), rates, strict=False)):
                raise ValueError(f"{name} must be shares, none larger than the one before it")
        return self

    @model_validator(mode="after")
    def _ranges_follow_one_another(self) -> Self:
        before = 0
        for first, last, tokens in self.num_speculative_tokens_per_batch_size or ():
            if not before < first <= last or tokens < 0 or (not before and first != 1):
                raise ValueError("num_speculative_tokens_per_batch_size must be ranges in order, the first from 1")
            before = last
        return self

    @model_validator(mode="after")
    def _settings_fit_the_method(self) -> Self:
        stated = [cost for cost in (self.draft_step_share, self.draft_us) if cost is not None]
        if self.method == "draft_model" and (self.model is None or stated):
            raise ValueError("method draft_model needs model; leave draft_step_share and draft_us out")
        if self.method == "mtp" and stated:
            raise ValueError("method mtp takes its time from the model; leave draft_step_share and draft_us out")
        if self.method != "draft_model" and (self.model is not None or len(stated) > 1):
            raise ValueError(f"method {self.method} takes either draft_step_share or draft_us; leave model out")
        shortest, longest = self.prompt_lookup
        if self.method != "ngram" and (self.prompt_lookup_min or self.prompt_lookup_max):
            raise ValueError("prompt_lookup_min and prompt_lookup_max are for method ngram; leave them out")
        if self.method != "draft_model" and self.draft_sample_method != "coupled":
            raise ValueError("draft_sample_method is for method draft_model; leave it out")
        if shortest > longest:
            raise ValueError("prompt_lookup_min must be at most prompt_lookup_max")
        return self

    def drafted_by(self, requests: int) -> int:
        """Return the number of tokens that are drafted for each request in a step of `requests` requests.

        vLLM looks it up in the same way (`build_dynamic_sd_schedule_lookup`): a gap between two ranges belongs to the
        range before it.
        """
        drafted = self.num_speculative_tokens
        for first, _, tokens in self.num_speculative_tokens_per_batch_size or ():
            if first <= requests:
                drafted = min(tokens, self.num_speculative_tokens)
        return drafted

    @property
    def states_acceptance(self) -> bool:
        """True if the configuration states the acceptance of drafts, which a simulation needs."""
        return self.acceptance_rate is not None or self.synthetic_acceptance_rates is not None

    def timing(self) -> Self:
        """Return the configuration with acceptance reset to its defaults: only what step times depend on."""
        chance = ("acceptance_rate", "synthetic_acceptance_rates", "proposal_rates", "rates_after", "seed")
        return self.model_copy(update={name: type(self).model_fields[name].default for name in chance})

    @property
    def prompt_lookup(self) -> tuple[int, int]:
        """The minimum and maximum number of last tokens that `ngram` looks up.

        If only one of the two settings is given, it applies to both, as in vLLM.
        """
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        return shortest or longest or _NGRAM, longest or shortest or _NGRAM

    @property
    def num_lookahead_tokens(self) -> int:
        """The number of tokens beyond those of its step that a request holds KV blocks for: drafting writes KV, too."""
        return 0 if self.method == "ngram" else self.num_speculative_tokens

    @property
    def num_hash_lookahead_tokens(self) -> int:
        """The number of tokens after a full block that must be known and match for the block to be a prefix hit."""
        return 1 if self.method in ("eagle", "mtp") else 0

    @property
    def draft_slots(self) -> int:
        """The number of budget tokens that a row takes beyond its own tokens; a draft model's input is one longer."""
        return 1 if self.method == "draft_model" else 0

    @property
    def conditional_rates(self) -> tuple[float, ...]:
        """The probability of acceptance at each place in a draft, given that the drafts before it were accepted.

        Raises UserError if the configuration states no acceptance.
        """
        if self.acceptance_rate is not None:
            return (self.acceptance_rate,) * self.num_speculative_tokens
        if self.synthetic_acceptance_rates is None:
            remedy = "is missing; the simulator needs it, or synthetic_acceptance_rates (docs/speculative.md)"
            raise UserError("scheduler.speculative.acceptance_rate", None, remedy)
        return conditional(self.synthetic_acceptance_rates)

    @property
    def tokens_per_step(self) -> float:
        """The mean number of tokens that a decoding request gets per step: its accepted drafts plus one.

        Raises UserError if the configuration states no acceptance.
        """
        return 1.0 + sum(accumulate(self.conditional_rates, mul))


def conditional(shares: tuple[float, ...]) -> tuple[float, ...]:
    """Return the probability of acceptance at each place, given that the drafts before it were accepted.

    `shares` are the shares of drafts that are accepted up to each place.
    """
    return tuple(share / before if before else 0.0 for before, share in pairwise((1.0, *shares)))


class Acceptance(Protocol):
    """The object that decides how many draft tokens are proposed and accepted.

    `step` is the number of the plan that is being made, or that has ended.
    """

    def proposed(self, request: Request, step: int) -> int:
        """Return how many draft tokens the next step can verify; this step samples for `request`.

        An acceptance that knows the number only when the step has ended sets `Request.proposed` at that time.
        """

    def accepted(self, request: Request, step: int, drafts: int) -> int:
        """Return how many of the `drafts` tokens that the step verified for `request` precede the first rejection."""


class Coins:
    """Acceptance on the virtual clock: as recorded in `drafted` of the request if it is set, otherwise by coins.

    An overlapped loop (`overlaps`) plans a step before its drafts are known, so the step has room for the maximum
    number of drafts. Drafts that turn out not to be proposed are rejected. Raises UserError if the configuration states
    no acceptance.
    """

    def __init__(self, config: SpeculativeConfig, overlaps: bool = False) -> None:
        self._overlaps = overlaps
        self._seed = str(config.seed).encode()
        self._most = config.num_speculative_tokens
        rates = [(config.proposal_rates, config.conditional_rates)]
        for one in config.rates_after or ():
            rates.append((one.proposal_rates, conditional(one.synthetic_acceptance_rates)))
        self._below = [
            ([round(rate * _COIN) for rate in reaches or ()], [round(rate * _COIN) for rate in accepted])
            for reaches, accepted in rates
        ]

    def proposed(self, request: Request, step: int) -> int:
        if self._overlaps:
            return self._most
        if not request.proposed:
            request.accepted_last = min(request.accepted_last, 0)
        return self._proposals(request, request.known + request.placeholders)

    def accepted(self, request: Request, step: int, drafts: int) -> int:
        known = request.known
        if self._overlaps:
            drafts = min(drafts, self._proposals(request, known))
        accepted = self.tossed(request, drafts)
        request.accepted_last = accepted or min(request.accepted_last, 0)
        if not self._overlaps and (len(self._below) > 1 or request.arrived.drafted is not None):
            # set again, because planning counted all drafts as accepted
            request.proposed = self._proposals(request, known + accepted + 1)
        return accepted

    def _rates(self, request: Request) -> tuple[list[int], list[int]]:
        """Return two thresholds for each place: a coin below them means that a draft reaches it, or is accepted."""
        if len(self._below) == 1:
            return self._below[0]
        last = request.accepted_last
        return self._below[4 if last == self._most else 2 + min(last, 1)]

    def _proposals(self, request: Request, tokens: int) -> int:
        """Return how many draft tokens are proposed for a request that has `tokens` tokens."""
        if (drafted := request.arrived.drafted) is not None:
            return len(drafted.get(tokens - request.prompt_len, ()))
        reaches, _ = self._rates(request)
        if not reaches:
            return self._most
        coin = self._coin(b"d%d:%d" % (request.id, tokens))
        return sum(coin < reach for reach in reaches)

    def tossed(self, request: Request, drafts: int) -> int:
        """Return how many of the `drafts` draft tokens after the request's present output are accepted."""
        place = request.outputs
        if (drafted := request.arrived.drafted) is not None:
            accepts = drafted.get(place, ())[:drafts]
            return accepts.index(False) if False in accepts else len(accepts)
        _, below = self._rates(request)
        for index in range(drafts):
            if self._coin(b"%d:%d" % (request.id, place + index)) >= below[index]:
                return index
        return drafts

    def _coin(self, name: bytes) -> int:
        """Return a pseudo-random number, uniform in [0, 2^64), that depends only on `name` and the seed."""
        tossed = blake2b(name, digest_size=8, key=self._seed[-64:])
        return int.from_bytes(tossed.digest(), "big")
