"""Fleets of several pools in the answer of a plan: two kinds of engines, or GPUs on demand beside spot GPUs."""

from __future__ import annotations

from typing import Any

from tokentwin.planning.plan.frontier import Fleet
from tokentwin.serving.answers.document import Number, Part, fact


class MixedPool(Fleet):
    """A pool of a mixed fleet."""

    max_prompt_tokens: int | None = fact("longest prompt that the pool serves; null: no limit", "tokens", default=None)
    spot: bool = fact("whether its GPUs are spot GPUs, which may be interrupted", default=False)


class MixedFleet(Part):
    """A fleet of several pools behind one router, compared with the best fleet of a single kind."""

    pools: tuple[MixedPool, ...] = fact("the pools; a request goes to the first that takes its prompt")
    gpus: int = fact("GPUs of all pools, spares included")
    usd_per_hour: float = fact("price of all GPUs, spares included", "$/h")
    change: Number = fact(
        "its price relative to the best fleet of a single kind on demand, minus 1; null if there is none", "fraction"
    )
    holds: Number = fact("probability that every SLO holds; null if unknown", "fraction")
    met: bool = fact("whether every SLO holds with the accepted risk")
    attainment: float = fact("share of the requests within every bound", "fraction")
    observed: dict[str, Number] = fact("figures by objective: a percentile in ms, or the attainment", default={})
    tok_s_user: Number = fact("output tokens/s of the median user", "tokens/s", default=None)
    interruptions: Number = fact("expected interruptions during the traffic; null without spot GPUs", default=None)
    if_interrupted: Number = fact(
        "share of the requests within every bound with one interruption half way through the traffic",
        "fraction",
        default=None,
    )
    without_spot: Number = fact(
        "the same share if all spot GPUs are gone; 0 if no GPU is on demand", "fraction", default=None
    )
    level: str = fact("trust in the fleet's step times", default="")
    reason: str = fact("reason of the level", default="")
    deployment: dict[str, Any] = fact("the deployment with the whole fleet, for `tokentwin simulate`", default={})

    @property
    def name(self) -> str:
        """The pools in words, such as `2 x TP1 L40S up to 1,024 prompt tokens + 3 x TP1 H100`."""
        return " + ".join(
            f"{pool.replicas} x {pool.engine}"
            + (f" up to {pool.max_prompt_tokens:,} prompt tokens" if pool.max_prompt_tokens else "")
            + (" spot" if pool.spot else "")
            for pool in self.pools
        )
