"""Traffic without a trace: mean lengths, and a rate, a number of users, or a number of requests in flight.

Lengths are lognormal, because lengths of real requests have long tails: with `_SPREADS` the standard deviation of
prompts is 1.3 times their mean, and that of outputs 0.95 times. What is made up is said in words beside every answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field

from tokentwin.planning.request import Request
from tokentwin.serving.answers.figures import counted, shown_number
from tokentwin.serving.deployments.config import parse
from tokentwin.serving.errors import UserError

if TYPE_CHECKING:
    from tokentwin.traces.distributions import Lognormal, NoTokens
    from tokentwin.traces.synth import SynthSpec

NAME = "made-up"
_SPREADS = {"prompt": 1.0, "output": 0.8}  # standard deviation of the logarithm of a length
_LONGEST = 8  # longest length as a multiple of the mean
_LASTS_S, _FEWEST, _MOST = 600.0, 1000, 20_000  # Poisson arrivals: seconds, and limits of the number of requests
_SHORTEST_S, _THINKS, _ASKED = 300.0, 12, 2000  # users: seconds, mean think times, and mean number of requests
_FEWEST_THINKS = 3  # mean think times of so many users that they send more than _MOST requests in the time above
_WAVES, _WARM_WAVES = 20, 3  # closed loop: requests of each client, and those of them that do not count
_THINK_S = 20.0  # default of the mean think time
_ARRIVALS = ("rate", "users", "concurrency")


class MadeUp(Request):
    """Mean lengths of requests, and exactly one of `rate`, `users` and `concurrency`."""

    prompt: int = Field(ge=1, le=10_000_000, description="without a trace: mean length of prompts in tokens")
    output: int = Field(
        ge=0,
        le=10_000_000,
        description="without a trace: mean length of answers in tokens; 0: pooling requests, for embeddings or scores",
    )
    rate: float | None = Field(None, gt=0, le=1e6, description="without a trace: requests per second (Poisson)")
    users: int | None = Field(
        None, ge=1, le=1_000_000, description="without a trace: number of users; each reads an answer, then asks again"
    )
    think_s: float | None = Field(
        None,
        ge=0.001,
        le=1e6,
        description="with users: mean seconds that a user reads between an answer and the next prompt (exponential), "
        f"{_THINK_S:g} by default",
    )
    concurrency: int | None = Field(
        None, ge=1, le=100_000, description="without a trace: number of requests that are always in flight"
    )

    def spec(self) -> SynthSpec:
        """Return the specification of the traffic. Raises UserError unless it has exactly one kind of arrivals."""
        from tokentwin.traces.synth import SynthSpec

        given = [name for name in _ARRIVALS if getattr(self, name) is not None]
        if len(given) != 1:
            remedy = "give exactly one of them, e.g. --users 50"
            raise UserError("rate, users, concurrency", " and ".join(given) or None, remedy)
        if self.think_s is not None and self.users is None:
            raise UserError("think", self.think_s, "needs --users; leave it out")
        return SynthSpec(name=NAME, **self._arrivals(), **{n: self._length(n) for n in _SPREADS})

    def _length(self, name: str) -> Lognormal | NoTokens:
        from tokentwin.traces.distributions import Lognormal, NoTokens

        mean = getattr(self, name)
        if not mean:
            return NoTokens(kind="none")
        return Lognormal(kind="lognormal", mean=mean, sigma=_SPREADS[name], max=_LONGEST * mean)

    def _arrivals(self) -> dict[str, Any]:
        from tokentwin.traces.distributions import Closed, Poisson, Users

        if self.rate is not None:
            requests = min(max(round(_LASTS_S * self.rate), _FEWEST), _MOST)
            return {"arrivals": Poisson(kind="poisson", rate=self.rate), "requests": requests}
        if self.users is not None:
            think_s = _THINK_S if self.think_s is None else self.think_s
            think = {"kind": "exponential", "mean": 1e3 * think_s}
            lasts_s = max(_SHORTEST_S, _THINKS * think_s, _ASKED * think_s / self.users)
            lasts_s = min(lasts_s, max(_FEWEST_THINKS, _MOST / self.users) * think_s)
            users = Users.model_validate({"kind": "users", "users": self.users, "think_ms": think})
            return {"arrivals": users, "duration_s": round(lasts_s, 3)}
        assert self.concurrency is not None
        waves = max(_WAVES, -(-_FEWEST // self.concurrency))
        return {
            "arrivals": Closed(kind="closed", concurrency=self.concurrency),
            "requests": waves * self.concurrency,
            "warm_up_requests": _WARM_WAVES * self.concurrency,
        }


def made_up(given: Mapping[str, Any]) -> SynthSpec:
    """Return the specification of traffic from mean lengths and arrivals; None values count as not given.

    Raises a UserError that names the wrong or missing field as an option.
    """
    known = {name: value for name, value in given.items() if value is not None}
    for name, example in (("prompt", 1500), ("output", 300)):
        if name not in known:
            raise UserError(name, None, f"is missing; without a trace give --{name}, e.g. --{name} {example}")
    try:
        return parse(MadeUp, known, where="").spec()
    except UserError as error:
        raise UserError(error.field.removeprefix(".").removesuffix("_s"), error.value, error.remedy) from None


def assumed(spec: object) -> str:
    """Return a sentence about everything that was made up; empty if `spec` is not traffic that `made_up` made."""
    from tokentwin.traces.distributions import Lognormal, NoTokens
    from tokentwin.traces.synth import SynthSpec

    if not isinstance(spec, SynthSpec) or spec.name != NAME:
        return ""
    lengths = [
        f"{what} with mean {shown_number(length.mean)} (sigma {length.sigma:g}, at most {length.max:,})"
        for what, length in (("prompts", spec.prompt), ("outputs", spec.output))
        if isinstance(length, Lognormal)
    ]
    drawn = f"lognormal {' and '.join(lengths)} tokens"
    if isinstance(spec.output, NoTokens):
        drawn += ", no outputs (pooling requests)"
    return f"made-up traffic: {_arriving(spec)}; {drawn}; seed {spec.seed}"


def _arriving(spec: SynthSpec) -> str:
    from tokentwin.traces.distributions import Closed, Users

    arrivals = spec.arrivals
    if isinstance(arrivals, Users):
        text = (
            f"{counted(arrivals.users, 'user')} who read {shown_number(arrivals.think_ms.expected / 1e3)} s on average"
        )
        text += " (exponential) between an answer and the next prompt"
        warm_s = 0.0 if spec.duration_s is None else spec.counted_from_s
        return f"{text}, {shown_number(spec.duration_s)} s of which the first {shown_number(warm_s)} do not count"
    if isinstance(arrivals, Closed):
        text = f"{counted(arrivals.concurrency, 'request')} always in flight, {spec.requests:,} in all"
        return f"{text}, of which the first {spec.warm_up_requests or 0:,} do not count"
    rate = shown_number(getattr(arrivals, "rate", None))
    return f"{rate} requests per second (Poisson), {spec.requests:,} in all"
