"""The request of `plan`: the traffic, the objectives, and the candidates."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from tokentwin.planning.plan.candidates import Split
from tokentwin.planning.request import GridCarbon, Pue, StatedDeployment, TimedBy
from tokentwin.planning.traffic import BUSIEST_S, Offered
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.gpu_spec import catalogue_name
from tokentwin.serving.errors import UserError

_OPTIONS = {"model": "--model", "tensor_parallel_size": "--tp", "policy": "--policy"}


class PlanRequest(Offered):
    """Every combination of GPUs, sizes, policies, varied settings and splits is a candidate; None means the default."""

    window_s: float = Field(BUSIEST_S, gt=0, le=1e9, description="plan for the busiest period of N seconds")
    slos: tuple[str, ...] = Field(
        description="an SLO that the fleet must meet, such as 'ttft_ms p99<=500', 'tpot_ms mean<=50' or "
        "'attainment>=0.99'; can be repeated"
    )
    model: str | None = Field(None, description="model to serve; by default that of --deployment, or Llama-3.1-8B")
    gpus: tuple[str, ...] | None = Field(None, description="GPU to consider; can be repeated, or a list with commas")
    tensor_parallel_sizes: tuple[int, ...] | None = Field(
        None, description="tensor-parallel size to consider; can be repeated, or a list with commas"
    )
    policies: tuple[str, ...] | None = Field(
        None, description="scheduling policy to consider; can be repeated, or a list with commas"
    )
    vary: dict[str, tuple[Any, ...]] | None = Field(
        None, description="values of another setting to consider, e.g. max_num_seqs=64,256; can be repeated"
    )
    splits: tuple[str, ...] | None = Field(
        None,
        description="ratios of prefill engines to decode engines to consider, such as 1:1,1:2, with encoders on a GPU "
        "of their own 1e1:2, or 1e3 for three engines that do both. none: every engine does everything. search: none, "
        "and every ratio of up to five engines",
    )
    mix: tuple[str, ...] | None = Field(
        None,
        description="also try fleets of two kinds of engines, one for prompts up to this many tokens and one for "
        "longer ones, such as 1000,4000. search: lengths that 50, 75 and 90 % of the prompts do not exceed",
    )
    spot: dict[str, Annotated[float, Field(ge=0, lt=1e9)]] | None = Field(
        None,
        description="also try spot GPUs at this price in dollars per GPU-hour, alone or beside GPUs on demand, e.g. "
        "H100=1.2; needs --interruptions-per-hour",
    )
    interruptions_per_hour: float | None = Field(
        None, ge=0, le=3600, description="mean number of interruptions of a spot replica per hour"
    )
    notice_s: float | None = Field(
        None,
        ge=0,
        le=1e6,
        description="seconds from the notice of an interruption until the spot replica is lost; by default 120",
    )
    restart_s: float | None = Field(
        None, ge=0, le=1e6, description="seconds from that notice until another spot replica is ready; by default 180"
    )
    rank_by: Literal["price", "gpus"] | None = Field(
        None, description="price: the cheapest fleet (default); gpus: the fleet with the fewest GPUs"
    )
    prices: dict[str, Annotated[float, Field(ge=0, lt=1e9)]] = Field(
        {},
        description="price in dollars per GPU-hour, instead of the catalogue's, e.g. H100=2.9; the name for the "
        "machine of our own engine is cpu or cuda (cuda=2.9)",
    )
    spares: int = Field(
        0,
        ge=0,
        le=10_000,
        description="number of spare replicas: paid for, but idle, so that as many replicas may fail",
    )
    energy: bool | None = Field(
        None, description="also estimate the power and the energy per token of the fleets that the answer shows"
    )
    pue: Pue = None
    grid_gco2_per_kwh: GridCarbon = None
    risk: float = Field(
        0.1,
        ge=0.01,
        le=0.5,
        description="accepted probability that an SLO breaks, given the uncertainty of step times and the random "
        "traffic",
    )
    router: str = Field("least-requests", description="router, by name or as path/to/file.py:Class")
    max_replicas: int = Field(1024, ge=1, le=100_000, description="maximum number of replicas to try")
    calibration: TimedBy = None
    deployment: StatedDeployment | None = Field(None, description="YAML file with all other settings of the engines")

    @field_validator("gpus", "tensor_parallel_sizes", "policies", "splits", "mix", mode="before")
    @classmethod
    def _some(cls, values: Any, info: Any) -> Any:
        called = {"gpus": "gpu", "tensor_parallel_sizes": "tp", "policies": "policy", "splits": "split", "mix": "mix"}
        option = called[info.field_name]
        if values is None:
            return values
        if not isinstance(values, list | tuple):
            raise UserError(option, repr(values), "must be a list")
        if not len(values):
            raise UserError(option, None, "is missing; choose at least one candidate")
        for value in values if option == "tp" else ():
            if not str(value).isdecimal() or not 1 <= int(value) <= 64:
                raise UserError("tp", value, "must be a number of GPUs from 1 to 64")
        return values

    @field_validator("gpus")
    @classmethod
    def _of_the_catalogue(cls, gpus: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return gpus and tuple(dict.fromkeys(map(catalogue_name, gpus)))

    @field_validator("prices", "spot")
    @classmethod
    def _by_catalogue_name(cls, prices: dict[str, float] | None) -> dict[str, float] | None:
        return prices and {catalogue_name(name): usd for name, usd in prices.items()}

    @field_validator("splits")
    @classmethod
    def _prefill_to_decode(cls, splits: tuple[str, ...] | None) -> tuple[str, ...] | None:
        Split.listed(splits or ())
        return splits

    @field_validator("mix")
    @classmethod
    def _prompt_lengths(cls, mix: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for text in mix or ():
            if text != "search" and not (text.isdecimal() and 1 <= int(text) <= 10**9):
                raise UserError("mix", text, "must be search, or prompt lengths in tokens, e.g. 1000,4000")
        return mix

    @model_validator(mode="after")
    def _spot_goes_together(self) -> PlanRequest:
        if self.spot and self.interruptions_per_hour is None:
            raise UserError("interruptions-per-hour", None, "is missing; state how often a spot replica is interrupted")
        for field in ("interruptions_per_hour", "notice_s", "restart_s"):
            if not self.spot and getattr(self, field) is not None:
                raise UserError(field.replace("_", "-"), getattr(self, field), "needs --spot GPU=DOLLARS")
        for name in self.spot or ():
            if name not in (self.gpus or (name,)):
                known = ", ".join(self.gpus or ())
                raise UserError("spot", name, f"is not the GPU of any candidate; choose from {known}")
        if self.spot and self.rank_by == "gpus":
            raise UserError("rank-by", "gpus", "cannot be combined with --spot, which saves no GPUs; leave one out")
        if self.spot and set(self.splits or ("none",)) != {"none"}:
            raise UserError(
                "spot", ", ".join(self.spot or ()), "cannot be combined with --split; leave one of them out"
            )
        return self

    @field_validator("deployment")
    @classmethod
    def _without_a_fleet(cls, deployment: Deployment | None) -> Deployment | None:
        if deployment is not None and deployment.fleet is not None:
            raise UserError("deployment.fleet", None, "must be left out, because a plan finds the fleet")
        return deployment

    @field_validator("vary")
    @classmethod
    def _each_once(cls, vary: dict[str, tuple[Any, ...]] | None) -> dict[str, tuple[Any, ...]] | None:
        for name, values in (vary or {}).items():
            pair = f"{name}={','.join(map(str, values))}"
            if name in _OPTIONS:
                raise UserError("vary", pair, f"cannot be varied here; use {_OPTIONS[name]}")
            if not values or any(value in values[:at] for at, value in enumerate(values)):
                raise UserError("vary", pair, "must name each setting once, with different values")
        return vary

    @property
    def asks_energy(self) -> bool:
        """True if the answer shall have figures of power and energy."""
        return bool(self.energy) or self.pue is not None or self.grid_gco2_per_kwh is not None

    @property
    def asks_mixed_fleets(self) -> bool:
        """True if the answer shall have fleets of several pools."""
        return self.mix is not None or bool(self.spot)

    @property
    def served(self) -> Deployment | None:
        """The deployment that is stated, with the model and the only tensor-parallel size; None if none is stated."""
        if self.deployment is None and self.model is None:
            return None
        stated = self.deployment or Deployment(device="cuda")
        sizes = self.tensor_parallel_sizes or ()
        changes = {"model": self.model} if self.model else {}
        return stated.model_copy(update=changes | ({"tensor_parallel_size": sizes[0]} if len(sizes) == 1 else {}))

    @property
    def variations(self) -> list[dict[str, Any]]:
        """Every combination of the values of each setting that varies."""
        vary = self.vary or {}
        return [dict(zip(vary, values, strict=True)) for values in product(*vary.values())]

    @property
    def combinations(self) -> int:
        """The number of candidates, or a larger one if some fit on no GPU."""
        listed = (self.gpus, self.tensor_parallel_sizes, self.policies, self.splits)
        return len(self.variations) * prod(len(values or "1") for values in listed)


class FleetRequest(PlanRequest):
    """The question how many clients a number of replicas can bear; the traffic says how each client behaves."""

    replicas: int = Field(
        ge=1,
        le=100_000,
        description="instead of sizing a fleet, find the most users (or requests in flight) that N replicas bear",
    )

    @model_validator(mode="after")
    def _of_one_kind(self) -> FleetRequest:
        if self.asks_mixed_fleets:
            name = "spot" if self.mix is None else "mix"
            raise UserError(name, None, f"cannot be combined with --replicas; leave --{name} out")
        return self

    @model_validator(mode="after")
    def _without_energy(self) -> FleetRequest:
        if self.asks_energy:
            raise UserError(
                "energy", None, "cannot be combined with --replicas; leave --energy, --pue and the grid out"
            )
        return self
