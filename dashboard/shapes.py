"""Bundled kinds of traffic for users without a trace: shapes, which need a rate, and mixes of shapes."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field

from tokentwin.planning.made_up import MadeUp
from tokentwin.traces.distributions import Drawn, NoTokens
from tokentwin.traces.synth import Adapters, Images, SynthSpec, SystemPrompts, parse_spec

LEAST_REQUESTS = 500  # minimum number of requests, because fewer say nothing about a 99th percentile
MOST_REQUESTS = 20_000  # maximum number of requests, because a plan for more takes minutes
TPOT_MS = 50.0
_FILLS = 3  # duration of the traffic as a multiple of that of the longest answers
SEED = 1
_LENGTHS = {"prompt", "output", "system_prompts", "images", "adapters"}  # what a shape says of each request
_APART = 1000  # distance between the seeds of the parts of a mix, so that another seed repeats no part


_Drawn = Annotated[Drawn, Field(discriminator="kind")]
_Output = Annotated[Drawn | NoTokens, Field(discriminator="kind")]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Shape(_Entry):
    """Lengths of a kind of request, and the minutes of traffic to simulate, by default as many as fill a fleet."""

    title: str
    about: str
    minutes: float | None = Field(None, gt=0, le=1440)
    prompt: _Drawn
    output: _Output
    system_prompts: SystemPrompts | None = None
    images: Images | None = None
    adapters: Adapters | None = None

    def traffic(self, rate: float, cv: float = 1.0, tpot_ms: float = TPOT_MS) -> SynthSpec:
        """Return traffic at `rate` requests a second; `cv` of the gaps is 1 for Poisson arrivals, more for bursts.

        It has at most `MOST_REQUESTS` requests, even if the minutes ask for more. `tpot_ms` is the longest allowed time
        per output token.
        """
        spec: dict[str, Any] = self.model_dump(include=_LENGTHS, exclude_none=True)
        arrivals = {"kind": "poisson", "rate": rate} if cv == 1 else {"kind": "gamma", "rate": rate, "cv": cv}
        requests = round(60 * (self.minutes or self.filling_minutes(tpot_ms)) * rate)
        requests = min(max(requests, LEAST_REQUESTS), MOST_REQUESTS)
        return parse_spec({"name": self.title, "seed": SEED, "requests": requests, "arrivals": arrivals, **spec})

    def awaited(self, **clients: Any) -> SynthSpec:
        """Return traffic of clients who wait for answers: `users` with `think_s`, or `concurrency`, as in `MadeUp`.

        Users send requests for `minutes` if they are set.
        """
        made = MadeUp(prompt=round(self.prompt.expected), output=round(self.output.expected), **clients).spec()
        spec = made.model_dump(mode="json", exclude_none=True)
        spec |= {"name": self.title, "seed": SEED}
        spec |= self.model_dump(include=_LENGTHS, exclude_none=True)
        if self.minutes is not None and "duration_s" in spec:
            spec["duration_s"] = 60 * self.minutes
        return parse_spec(spec)

    def filling_minutes(self, tpot_ms: float) -> int:
        """Return the whole minutes that `_FILLS` of the longest answers (p99) take in a row, at `tpot_ms` a token.

        A fleet that begins empty is full when the longest of its first requests have been answered. Traffic that ends
        before shows too low latencies.
        """
        outputs = self.output.draw(np.random.default_rng(SEED), 10_000)
        longest_ms = float(np.percentile(outputs, 99, method="inverted_cdf")) * tpot_ms
        return max(math.ceil(_FILLS * longest_ms / 60_000), 1)


@cache
def shapes() -> dict[str, Shape]:
    """Return the bundled shapes by name."""
    return {name: Shape.model_validate(entry) for name, entry in _entries("shapes.yaml").items()}


class Part(_Entry):
    """A kind of request with its `share` of the arrivals, relative to the other parts."""

    shape: str
    share: float = Field(1.0, gt=0)
    cv: float = Field(1.0, gt=0)
    tenant: str = ""
    slo_class: str = ""
    priority: int = 0


class Mix(_Entry):
    """Several kinds of requests that arrive mixed."""

    title: str
    about: str
    parts: tuple[Part, ...]

    def traffic(self, rate: float, duration_s: float) -> tuple[SynthSpec, ...]:
        """Return a specification of each part; together they arrive at `rate` requests a second."""
        whole = sum(part.share for part in self.parts)
        return tuple(
            shapes()[part.shape]
            .traffic(rate * part.share / whole, part.cv)
            .model_copy(
                update={
                    "name": self.title,
                    "seed": SEED + _APART * number,
                    "requests": None,
                    "duration_s": duration_s,
                    **part.model_dump(include={"tenant", "slo_class", "priority"}),
                }
            )
            for number, part in enumerate(self.parts)
        )


@cache
def mixes() -> dict[str, Mix]:
    """Return the bundled mixes by name."""
    return {name: Mix.model_validate(entry) for name, entry in _entries("mixes.yaml").items()}


def _entries(name: str) -> dict[str, Any]:
    entries: dict[str, Any] = yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    return entries
