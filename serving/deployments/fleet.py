"""How a fleet is set up: pools of engines behind a router, what is admitted, what fails, and how it scales.

The section `fleet` of a deployment's YAML file. Only the simulator has fleets; the real engine is one engine. Every
random draw below has a seed of its own and depends on nothing but that seed and what it is drawn for (a request; or a
replica's place in its pool and how many had it before), so that two fleets offered the same requests meet the same
users and the same accidents.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_serializer, field_validator, model_validator

from serving.plugins import located


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PoolConfig(_Settings):
    """Replicas that are alike."""

    name: str = Field("pool", min_length=1, description="name of the pool, unique in the fleet")
    role: Literal["serve", "prefill", "decode"] = Field(
        "serve", description="prefill: up to the first token, then a decode pool takes over; serve: all of a request"
    )
    replicas: int = Field(1, ge=0, le=100_000, description="replicas at the start")
    deployment: dict[str, Any] = Field({}, description="settings that differ from the deployment's, nested alike")
    gpu: str | None = Field(None, description="GPU of the pool, by name; null: as the others")
    calibration: str | None = Field(None, description="calibration that times the pool's steps; null: as the others")
    speed: float = Field(1.0, gt=0, le=1000, description="how many times as fast its steps are as its cost model says")
    slo_classes: tuple[str, ...] = Field(
        (), description="SLO classes it is reserved for; a class that no pool names goes to the pools that name none"
    )


class RouterConfig(_Settings):
    """A router and what its constructor takes. In YAML a name alone will do."""

    name: str = Field("round-robin", description="a router's name, path/to/file.py:Class or package.module:Class")
    settings: dict[str, int | float | str | bool] = Field({}, description="keyword arguments of the router")

    @field_validator("name")
    @classmethod
    def _is_found_from_anywhere(cls, name: str) -> str:
        return located(name)


class LinksConfig(_Settings):
    """What carries KV from prefill to decode replicas. GB are 10^9 bytes."""

    nic_gb_s: float = Field(50.0, gt=0, le=1e9, description="GB/s that a replica sends at most, and receives at most")
    fabric_gb_s: float | None = Field(None, gt=0, le=1e9, description="GB/s of all transfers together; null: no limit")
    latency_us: float = Field(20.0, ge=0, le=1e9, description="microseconds before a transfer gets going")
    kv_bytes_per_token: int | None = Field(
        None, ge=1, le=10**9, description="KV bytes of a token, of all layers and devices; null: by the model's shapes"
    )


class Patience(_Settings):
    """How long a user waits before cancelling, from the arrival on."""

    mean_s: float = Field(gt=0, le=1e9, description="mean patience")
    distribution: Literal["exponential", "constant"] = Field("exponential", description="how it varies between users")
    until: Literal["first-token", "finish"] = Field("first-token", description="what they wait for")
    seed: int = Field(0, description="seed of everybody's patience")


class Retry(_Settings):
    """What a client does that was refused or timed out: attempt k + 1 comes backoff_s * factor^(k-1) later."""

    max_attempts: int = Field(1, ge=1, le=1000, description="attempts in all; 1 never tries again")
    backoff_s: float = Field(1.0, gt=0, le=1e6, description="wait before the second attempt")
    factor: float = Field(2.0, ge=1, le=100, description="by which the wait grows with each attempt")
    max_backoff_s: float = Field(60.0, gt=0, le=1e6, description="longest wait")
    jitter: float = Field(0.5, ge=0, le=1, description="share of each wait that is drawn uniformly from 0 up")
    seed: int = Field(0, description="seed of the jitter")


class AdmissionConfig(_Settings):
    """Who is let in, and who gives up. By default everybody, and nobody."""

    max_queued_per_replica: int | None = Field(None, ge=1, description="requests that may wait at one replica")
    max_queued: int | None = Field(None, ge=1, description="requests that may wait in the whole fleet")
    queue_timeout_s: float | None = Field(
        None, gt=0, le=1e9, description="longest wait for the first step of an attempt"
    )
    patience: Patience | None = Field(None, description="users who cancel")
    retry: Retry = Retry()


class Crash(_Settings):
    """One replica is lost, with its KV cache and its steps in flight; its requests start again elsewhere."""

    at_s: float = Field(ge=0, le=1e9, description="when")
    pool: str | None = Field(None, description="in which pool; null: the first")
    replica: int = Field(0, ge=0, description="which of the pool's replicas then ready, the oldest being 0")
    recovery_s: float | None = Field(60.0, ge=0, le=1e9, description="until its successor is ready; null: none comes")


class Slowdown(_Settings):
    """One replica is slow for a while."""

    at_s: float = Field(ge=0, le=1e9, description="when")
    for_s: float = Field(gt=0, le=1e9, description="how long")
    factor: float = Field(gt=0, le=1000, description="by which steps planned meanwhile take longer")
    pool: str | None = Field(None, description="in which pool; null: the first")
    replica: int = Field(0, ge=0, description="which of the pool's replicas then ready, the oldest being 0")


class LinkLoss(_Settings):
    """Nothing goes into or out of one replica for a while."""

    at_s: float = Field(ge=0, le=1e9, description="when")
    for_s: float = Field(gt=0, le=1e9, description="how long")
    pool: str = Field(description="in which pool, of role prefill or decode")
    replica: int = Field(0, ge=0, description="which of the pool's replicas then ready, the oldest being 0")


class FailuresConfig(_Settings):
    """Accidents, given or drawn."""

    crashes: tuple[Crash, ...] = Field((), description="crashes at given times")
    link_losses: tuple[LinkLoss, ...] = Field((), description="lost links at given times")
    slowdowns: tuple[Slowdown, ...] = Field((), description="slow replicas at given times")
    mtbf_s: float | None = Field(
        None, gt=0, le=1e12, description="mean time a replica runs before it crashes, exponential; null: none do"
    )
    recovery_s: float = Field(60.0, ge=0, le=1e9, description="until the successor of such a replica is ready")
    seed: int = Field(0, description="seed of those crashes")


class AutoscalerConfig(_Settings):
    """How many replicas one pool has. Looks every `interval_s`.

    `queue` is waiting requests per ready replica and `kv` the mean share of KV blocks in use: when above `target`, the
    pool is brought to ceil(replicas * value / target); when below `scale_in_below * target`, to one replica fewer.
    `attainment` is the share of the requests ended since it last looked that finished within `slo_ms`: when below
    `target`, the pool gets one replica more; when `scale_in_at` or above, one fewer.
    """

    metric: Literal["queue", "kv", "attainment"] = Field("queue", description="what it looks at")
    target: float = Field(gt=0, le=1e6, description="value of the metric it aims at")
    pool: str | None = Field(None, description="the pool it scales; null: the first")
    min_replicas: int = Field(1, ge=1, le=100_000, description="fewest replicas")
    max_replicas: int = Field(ge=1, le=100_000, description="most replicas")
    interval_s: float = Field(15.0, gt=0, le=1e6, description="time between two looks")
    cold_start_s: float = Field(60.0, ge=0, le=1e6, description="from the decision until a new replica is ready")
    cooldown_s: float = Field(300.0, ge=0, le=1e9, description="from any change until the next scale-in")
    scale_in_below: float = Field(0.5, ge=0, lt=1, description="share of the target below which it scales in")
    scale_in_at: float = Field(1.0, gt=0, le=1, description="attainment at which it scales in")
    slo_ms: dict[Literal["ttft", "tpot", "e2e"], float] = Field({}, description="attainment: bounds in milliseconds")

    @model_validator(mode="after")
    def _consistent(self) -> AutoscalerConfig:
        if self.max_replicas < self.min_replicas:
            raise ValueError("max_replicas must be at least min_replicas")
        if (self.metric == "attainment") != bool(self.slo_ms):
            raise ValueError("slo_ms goes with metric attainment, which needs it")
        if any(bound <= 0 for bound in self.slo_ms.values()):
            raise ValueError("slo_ms must be above 0")
        if self.metric != "queue" and self.target > 1:
            raise ValueError(f"target of {self.metric} is a share, at most 1")
        return self


class FleetConfig(_Settings):
    """All of it. By default one pool of one replica."""

    pools: tuple[PoolConfig, ...] = Field((PoolConfig(),), min_length=1, description="what the fleet is made of")
    router: RouterConfig = RouterConfig()
    decode_router: RouterConfig | None = Field(None, description="which decode replica takes over; null: as router")
    first_token_from: Literal["prefill", "decode"] = Field(
        "prefill",
        description="whose first token users get: decode samples it again from what it pulled, as stock vLLM does",
    )
    links: LinksConfig | None = Field(None, description="links from prefill to decode pools; null: as by default")
    admission: AdmissionConfig = AdmissionConfig()
    failures: FailuresConfig = FailuresConfig()
    autoscaler: tuple[AutoscalerConfig, ...] | None = Field(
        None,
        min_length=1,
        description="one, or a list of one for each of several pools; null: the fleet stays as it is",
    )

    @field_validator("router", "decode_router", mode="before")
    @classmethod
    def _a_name_alone(cls, router: Any) -> Any:
        return {"name": router} if isinstance(router, str) else router

    @field_validator("autoscaler", mode="before")
    @classmethod
    def _one_alone(cls, autoscaler: Any) -> Any:
        return (autoscaler,) if isinstance(autoscaler, dict | AutoscalerConfig) else autoscaler

    @field_serializer("autoscaler")
    def _alone_as_it_was_given(self, autoscaler: tuple[AutoscalerConfig, ...] | None) -> Any:
        dumped = [scaler.model_dump() for scaler in autoscaler or ()]
        return dumped if len(dumped) > 1 else next(iter(dumped), None)

    @model_validator(mode="after")
    def _pools_exist(self) -> FleetConfig:
        names = [pool.name for pool in self.pools]
        if len(set(names)) < len(names):
            raise ValueError("pools must have different names")
        asked = [crash.pool for crash in self.failures.crashes]
        asked += [slowdown.pool for slowdown in self.failures.slowdowns]
        asked += [loss.pool for loss in self.failures.link_losses]
        scaled = [scaler.pool for scaler in self.autoscaler or ()]
        for pool in asked + scaled:
            if pool is not None and pool not in names:
                raise ValueError(f"there is no pool {pool!r}; there are {', '.join(names)}")
        if not any(pool.replicas for pool in self.pools) and self.autoscaler is None:
            raise ValueError("a fleet needs a replica")
        if len({self.pool_number(pool) for pool in scaled}) < len(scaled):
            raise ValueError("each autoscaler needs a pool of its own; say which in pool")
        return self

    @model_validator(mode="after")
    def _roles_go_together(self) -> FleetConfig:
        roles = {pool.role for pool in self.pools}
        if ("prefill" in roles) != ("decode" in roles):
            missing = "decode" if "prefill" in roles else "prefill"
            raise ValueError(
                f"pools of role prefill and of role decode need each other; there is none of role {missing}"
            )
        if "prefill" not in roles:
            for name, given in (
                ("links", self.links),
                ("decode_router", self.decode_router),
                ("first_token_from", self.first_token_from == "decode"),
                ("failures.link_losses", self.failures.link_losses),
            ):
                if given:
                    raise ValueError(f"{name} goes with pools of role prefill and decode")
        for loss in self.failures.link_losses:
            if self.pools[self.pool_number(loss.pool)].role == "serve":
                raise ValueError(f"pool {loss.pool!r} of a lost link is of role serve, which has no links")
        return self

    @property
    def prefills_apart(self) -> bool:
        """Whether some pools only prefill and others only decode."""
        return any(pool.role == "prefill" for pool in self.pools)

    def pool_number(self, name: str | None) -> int:
        """Where the pool called `name` stands in `pools`; the first for None."""
        return 0 if name is None else [pool.name for pool in self.pools].index(name)
