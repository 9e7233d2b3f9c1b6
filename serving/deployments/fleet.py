"""The setup of a fleet: pools of engines behind a router, the limits of admission, failures, and autoscaling.

It is the section `fleet` of a deployment's YAML file. Real engines support one pool and a router; the simulator
supports everything. Each kind of random draw below has its own seed. A draw depends only on that seed and its subject:
a request, or a replica's place in its pool together with the number of earlier replicas in this place. So in two fleets
with equal requests, users wait equally long and failures are the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_serializer, field_validator, model_validator

from tokentwin.serving.settings import TerseSettings
from tokentwin.serving.user_code.plugins import located


class _Settings(TerseSettings, allow_inf_nan=False):
    pass


class PoolConfig(_Settings):
    """A pool of equal replicas."""

    seldom_set = ("max_prompt_tokens", "max_total_tokens", "usd_per_gpu_hour")

    name: str = Field("pool", min_length=1, description="name of the pool, unique in the fleet")
    role: Literal["serve", "prefill", "decode", "encode"] = Field(
        "serve",
        description="serve: run complete requests; prefill: run requests up to the first token; decode: run the rest; "
        "encode: encode images, videos and audio for the other pools (docs/multimodal.md)",
    )
    replicas: int = Field(1, ge=0, le=100_000, description="number of replicas at the start")
    deployment: dict[str, Any] = Field(
        {}, description="settings in which the pool differs from the deployment, nested in the same way"
    )
    gpu: str | None = Field(None, description="name of the pool's GPU; null: the GPU of the run")
    calibration: str | None = Field(
        None, description="calibration with the pool's step times; null: the calibration of the run"
    )
    speed: float = Field(
        1.0, gt=0, le=1000, description="speed relative to the predicted step times; 2 is twice as fast"
    )
    slo_classes: tuple[str, ...] = Field(
        (),
        description="SLO classes that the pool serves; a class that no pool lists goes to the pools with an empty list",
    )
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="longest prompt that the pool serves; longer ones go to later pools; null: no limit"
    )
    max_total_tokens: int | None = Field(
        None, ge=1, description="the same limit for prompt tokens and max_tokens together; null: no limit"
    )
    usd_per_gpu_hour: float | None = Field(
        None, ge=0, lt=1e9, description="price of a GPU of the pool, such as a spot price; null: the price of its GPU"
    )

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """The most prompt tokens, and the most prompt tokens and `max_tokens` together, of a request for this pool."""
        return self.max_prompt_tokens, self.max_total_tokens


def routed_pools(pools: Sequence[PoolConfig], roles: Collection[str]) -> dict[str | None, tuple[tuple[int, ...], ...]]:
    """Return the indices of the pools of some `roles` by SLO class, in groups of equal limits.

    A request goes to the first group that has room for its length. The key None stands for all classes for which no
    pool is reserved.
    """
    numbers = [number for number, pool in enumerate(pools) if pool.role in roles]
    names = dict.fromkeys(name for number in numbers for name in pools[number].slo_classes)
    by_class: dict[str | None, list[int]] = {
        name: [number for number in numbers if name in pools[number].slo_classes] for name in names
    }
    by_class[None] = [number for number in numbers if not pools[number].slo_classes] or numbers
    grouped = {}
    for name, members in by_class.items():
        limits = dict.fromkeys(pools[number].limits for number in members)
        grouped[name] = tuple(tuple(n for n in members if pools[n].limits == limit) for limit in limits) or ((),)
    return grouped


class RouterConfig(_Settings):
    """A router and the arguments of its constructor. In YAML, the name alone is enough."""

    name: str = Field("round-robin", description="name of a router, path/to/file.py:Class or package.module:Class")
    settings: dict[str, int | float | str | bool] = Field({}, description="keyword arguments of the router's class")

    @field_validator("name")
    @classmethod
    def _is_found_from_anywhere(cls, name: str) -> str:
        return located(name)


class LinksConfig(_Settings):
    """The links that carry KV from prefill to decode replicas, and embeddings from encoders. One GB is 10^9 bytes."""

    seldom_set = ("shares_inter_node",)

    nic_gb_s: float = Field(
        50.0, gt=0, le=1e9, description="maximum GB/s at which one replica sends KV, and at which it receives KV"
    )
    fabric_gb_s: float | None = Field(
        None, gt=0, le=1e9, description="maximum total GB/s of all transfers in the fleet; null: no limit"
    )
    latency_us: float = Field(20.0, ge=0, le=1e9, description="microseconds before a transfer starts")
    shares_inter_node: bool = Field(
        False,
        description="true: KV transfers share the network adapters between an engine's nodes with its collectives",
    )
    kv_bytes_per_token: int | None = Field(
        None,
        ge=1,
        le=10**9,
        description="KV bytes of one token over all layers and devices; null: from the model's shapes",
    )


class Patience(_Settings):
    """The time after arrival for which a user waits before cancelling."""

    mean_s: float = Field(gt=0, le=1e9, description="mean seconds that users wait")
    distribution: Literal["exponential", "constant"] = Field("exponential", description="distribution of the waits")
    until: Literal["first-token", "finish"] = Field("first-token", description="event that users wait for")
    seed: int = Field(0, description="seed of the users' patience")


class Retry(_Settings):
    """The retries of a client after a refusal or a timeout: attempt k + 1 comes backoff_s * factor^(k-1) later."""

    max_attempts: int = Field(1, ge=1, le=1000, description="number of attempts, including the first; 1: never retry")
    backoff_s: float = Field(1.0, gt=0, le=1e6, description="seconds before the second attempt")
    factor: float = Field(2.0, ge=1, le=100, description="factor by which the wait grows with each attempt")
    max_backoff_s: float = Field(60.0, gt=0, le=1e6, description="maximum wait in seconds")
    jitter: float = Field(0.5, ge=0, le=1, description="fraction of each wait that is random; 0: none, 1: all of it")
    seed: int = Field(0, description="seed of the jitter")


class AdmissionConfig(_Settings):
    """The limits of admission and of patience. By default all requests are admitted and no user gives up."""

    max_queued_per_replica: int | None = Field(
        None, ge=1, description="maximum number of waiting requests at one replica; null: no limit"
    )
    max_queued: int | None = Field(
        None, ge=1, description="maximum number of waiting requests in the fleet; null: no limit"
    )
    queue_timeout_s: float | None = Field(
        None,
        gt=0,
        le=1e9,
        description="maximum seconds that a request waits for its first step, anew for each attempt; null: no limit",
    )
    patience: Patience | None = Field(None, description="time after which users give up and cancel; null: never")
    retry: Retry = Retry()


class Crash(_Settings):
    """The loss of one replica with its KV cache and its steps in flight; its requests start again elsewhere."""

    at_s: float = Field(ge=0, le=1e9, description="time of the crash in seconds, from the start of the run")
    pool: str | None = Field(None, description="pool of the replica; null: the first pool")
    replica: int = Field(
        0, ge=0, description="index of the replica among the pool's replicas that are ready then; 0 is the oldest"
    )
    recovery_s: float | None = Field(
        60.0, ge=0, le=1e9, description="seconds from the crash until a new replica is ready; null: never"
    )


class Slowdown(_Settings):
    """A period in which one replica is slow."""

    at_s: float = Field(ge=0, le=1e9, description="start of the slowdown in seconds, from the start of the run")
    for_s: float = Field(gt=0, le=1e9, description="duration of the slowdown in seconds")
    factor: float = Field(gt=0, le=1000, description="factor by which steps planned in this period take longer")
    pool: str | None = Field(None, description="pool of the replica; null: the first pool")
    replica: int = Field(
        0, ge=0, description="index of the replica among the pool's replicas that are ready then; 0 is the oldest"
    )


class LinkLoss(_Settings):
    """A period in which one replica has no links, so that no KV can be sent to it or from it."""

    at_s: float = Field(
        ge=0, le=1e9, description="time at which the links are lost, in seconds from the start of the run"
    )
    for_s: float = Field(gt=0, le=1e9, description="seconds until the links work again")
    pool: str = Field(description="pool of the replica; the pool must have role prefill or decode")
    replica: int = Field(
        0, ge=0, description="index of the replica among the pool's replicas that are ready then; 0 is the oldest"
    )


class Interruptions(_Settings):
    """The interruptions of spot replicas, which the provider takes back after a notice.

    From the notice on, the replica gets no new requests. What it has not finished at the end of the notice starts again
    elsewhere, as after a crash.
    """

    pool: str | None = Field(None, description="pool of spot replicas; null: the first pool")
    per_hour: float = Field(
        0.0, ge=0, le=3600, description="mean number of interruptions of a replica per hour (exponential intervals)"
    )
    at_s: tuple[Annotated[float, Field(ge=0, le=1e9)], ...] = Field(
        (),
        description="times of further notices in seconds from the start of the run, each to the oldest ready replica",
    )
    notice_s: float = Field(
        120.0, ge=0, le=1e6, description="seconds from the notice until the replica is lost; 0: it is lost at once"
    )
    restart_s: float | None = Field(
        180.0, ge=0, le=1e9, description="seconds from the notice until a new replica is ready; null: never"
    )


class FailuresConfig(_Settings):
    """The failures of a fleet, at given times or at random."""

    seldom_set = ("interruptions",)

    crashes: tuple[Crash, ...] = Field((), description="crashes at given times")
    link_losses: tuple[LinkLoss, ...] = Field((), description="lost links at given times")
    slowdowns: tuple[Slowdown, ...] = Field((), description="slow replicas at given times")
    mtbf_s: float | None = Field(
        None,
        gt=0,
        le=1e12,
        description="mean time in seconds until a replica crashes (exponential); null: no random crashes",
    )
    recovery_s: float = Field(
        60.0, ge=0, le=1e9, description="seconds from a random crash until a new replica is ready"
    )
    interruptions: tuple[Interruptions, ...] = Field((), description="interruptions of the pools of spot replicas")
    seed: int = Field(0, description="seed of the random crashes and interruptions")


class AutoscalerConfig(_Settings):
    """The number of replicas of one pool, which the autoscaler reviews every `interval_s`.

    `queue` is the number of waiting requests per ready replica, and `kv` the mean share of KV blocks in use. If such a
    metric is above `target`, the pool gets ceil(replicas * value / target) replicas; if it is below `scale_in_below *
    target`, the pool loses one replica. `attainment` is the share of requests that met `slo_ms`, among those that ended
    since the last review. If it is below `target`, the pool gets one more replica; if it is at least `scale_in_at`, the
    pool loses one. With several `targets`, the metric that wants most replicas decides.
    """

    metric: Literal["queue", "kv", "attainment"] = Field("queue", description="metric that the autoscaler reviews")
    target: float | None = Field(None, gt=0, le=1e6, description="target value of the metric")
    targets: dict[Literal["queue", "kv"], Annotated[float, Field(gt=0, le=1e6)]] = Field(
        {}, description="several metrics with their targets, instead of `metric` and `target`"
    )
    rule: Literal["proportional", "hpa"] = Field(
        "proportional",
        description="rule for queue and kv: proportional scales in by one replica at a time; hpa is the rule of "
        "Kubernetes' HorizontalPodAutoscaler",
    )
    pool: str | None = Field(None, description="pool to scale; null: the first pool")
    min_replicas: int = Field(1, ge=0, le=100_000, description="minimum number of replicas; 0: scale to zero")
    max_replicas: int = Field(ge=1, le=100_000, description="maximum number of replicas")
    interval_s: float = Field(15.0, gt=0, le=1e6, description="seconds between two reviews")
    scrape_delay_s: float = Field(
        0.0, ge=0, le=1e6, description="queue, kv: minimum age in seconds of the values that a review sees"
    )
    cold_start_s: float = Field(60.0, ge=0, le=1e6, description="seconds until an added replica is ready")
    weights_gb_s: float | None = Field(
        None,
        gt=0,
        description="10^9 bytes per second at which an added replica reads its weights; the time is added to "
        "cold_start_s; null: cold_start_s is the whole time",
    )
    cooldown_s: float = Field(
        300.0,
        ge=0,
        le=1e9,
        description="minimum seconds from any change of the pool to its next scale-in; hpa: the largest number of "
        "replicas that was wanted in so many seconds stays (stabilizationWindowSeconds of scaleDown)",
    )
    scale_out_window_s: float = Field(
        0.0,
        ge=0,
        le=1e9,
        description="hpa: scale out to the smallest number of replicas that was wanted in so many seconds "
        "(stabilizationWindowSeconds of scaleUp)",
    )
    scale_in_below: float = Field(0.5, ge=0, lt=1, description="queue, kv: scale in below this fraction of the target")
    scale_in_at: float = Field(1.0, gt=0, le=1, description="attainment: scale in at this value or above")
    slo_ms: dict[Literal["ttft", "tpot", "e2e"], Annotated[float, Field(gt=0)]] = Field(
        {}, description="attainment: latency bounds in ms that requests must meet"
    )

    @model_validator(mode="after")
    def _consistent(self) -> AutoscalerConfig:
        if self.max_replicas < self.min_replicas:
            raise ValueError("max_replicas must be at least min_replicas")
        if (self.metric == "attainment") != bool(self.slo_ms):
            raise ValueError("metric attainment needs slo_ms, and no other metric takes it")
        if (self.target is None) != bool(self.targets):
            raise ValueError("state either target, or targets")
        if self.targets and self.metric != "queue":
            raise ValueError("targets name their metrics; leave metric out")
        for metric, target in self.goals.items():
            if metric != "queue" and target > 1:
                raise ValueError(f"target of metric {metric} is a share; it must be at most 1")
        if self.metric == "attainment" and (self.rule == "hpa" or self.scrape_delay_s or not self.min_replicas):
            raise ValueError("metric attainment takes no rule hpa, no scrape_delay_s and no min_replicas of 0")
        if self.scale_out_window_s and self.rule != "hpa":
            raise ValueError("scale_out_window_s needs rule hpa")
        return self

    @property
    def goals(self) -> dict[str, float]:
        """The target of each metric."""
        goals: dict[str, float] = {} if self.target is None else {self.metric: self.target}
        goals.update(self.targets.items())
        return goals


class FleetConfig(_Settings):
    """A whole fleet. The default is one pool of one replica."""

    seldom_set = ("decode_reserves", "encode_router", "processes")

    pools: tuple[PoolConfig, ...] = Field((PoolConfig(),), min_length=1, description="the pools of replicas")
    router: RouterConfig = RouterConfig()
    decode_router: RouterConfig | None = Field(None, description="router of the decode pools; null: the same as router")
    encode_router: RouterConfig | None = Field(
        None, description="router of the images of requests to the encode pools; null: round-robin, as vLLM's proxy"
    )
    first_token_from: Literal["prefill", "decode"] = Field(
        "prefill",
        description="replica that sends the first token to users; a decode replica samples this token again, as in "
        "vLLM",
    )
    decode_reserves: Literal["after-prefill", "before-prefill"] = Field(
        "after-prefill",
        description="when a decode replica takes KV blocks for a prompt: after-prefill, as in vLLM and TensorRT-LLM, "
        "or before-prefill, as in SGLang",
    )
    links: LinksConfig | None = Field(
        None, description="links from prefill to decode pools, and from encode pools; null: the defaults"
    )
    admission: AdmissionConfig = AdmissionConfig()
    failures: FailuresConfig = FailuresConfig()
    autoscaler: tuple[AutoscalerConfig, ...] | None = Field(
        None,
        min_length=1,
        description="an autoscaler, or a list with one autoscaler for each pool; null: the fleet keeps its size",
    )
    processes: tuple[str, ...] = Field(
        (),
        description="your own SimPy processes on the virtual clock: path/to/file.py:function or "
        "package.module:function",
    )

    @field_validator("router", "decode_router", "encode_router", mode="before")
    @classmethod
    def _a_name_alone(cls, router: Any) -> Any:
        return {"name": router} if isinstance(router, str) else router

    @field_validator("processes")
    @classmethod
    def _are_found_from_anywhere(cls, processes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(located, processes))

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
        named = [crash.pool for crash in self.failures.crashes]
        named += [slowdown.pool for slowdown in self.failures.slowdowns]
        named += [loss.pool for loss in self.failures.link_losses]
        named += [interruptions.pool for interruptions in self.failures.interruptions]
        scaled = [scaler.pool for scaler in self.autoscaler or ()]
        for pool in named + scaled:
            if pool is not None and pool not in names:
                raise ValueError(f"there is no pool {pool!r}; choose one of {', '.join(names)}")
        if not any(pool.replicas for pool in self.pools) and self.autoscaler is None:
            raise ValueError("a fleet needs at least one replica, or an autoscaler")
        if len({self.pool_number(pool) for pool in scaled}) < len(scaled):
            raise ValueError("two autoscalers scale the same pool; give each its own pool")
        return self

    @model_validator(mode="after")
    def _every_length_has_a_pool(self) -> FleetConfig:
        for roles in (("serve", "prefill"), ("decode",)):
            for groups in routed_pools(self.pools, roles).values():
                limits = [self.pools[group[0]].limits for group in groups if group]
                if limits and limits[-1] != (None, None):
                    pool = self.pools[groups[-1][0]].name
                    raise ValueError(f"no pool takes longer requests than {pool!r}; list a pool without limit last")
        return self

    @model_validator(mode="after")
    def _roles_go_together(self) -> FleetConfig:
        roles = {pool.role for pool in self.pools}
        if ("prefill" in roles) != ("decode" in roles):
            missing = "decode" if "prefill" in roles else "prefill"
            raise ValueError(f"prefill pools and decode pools need each other; add a pool of role {missing}")
        if not roles - {"encode"}:
            raise ValueError("a pool of role encode needs a pool that prefills; add one of role serve, or two others")
        apart = "prefill" in roles
        for name, given, fits, needed in (
            ("links", self.links, apart or self.encodes_apart, "prefill and decode, or encode"),
            ("failures.link_losses", self.failures.link_losses, apart or self.encodes_apart, "prefill and decode"),
            ("decode_router", self.decode_router, apart, "prefill and decode"),
            ("first_token_from", self.first_token_from == "decode", apart, "prefill and decode"),
            ("decode_reserves", self.reserves_first, apart, "prefill and decode"),
            ("encode_router", self.encode_router, self.encodes_apart, "encode"),
        ):
            if given and not fits:
                raise ValueError(f"{name} needs pools of role {needed}; leave it out")
        if self.reserves_first:
            if self.first_token_from == "decode":
                raise ValueError(
                    "decode_reserves: before-prefill cannot be combined with first_token_from: decode; leave one out"
                )
            if "serve" in roles:
                raise ValueError(
                    "decode_reserves: before-prefill needs prefill and decode pools only; drop other pools"
                )
        for loss in self.failures.link_losses:
            if self.pools[self.pool_number(loss.pool)].role == "serve" and not self.encodes_apart:
                raise ValueError(f"pool {loss.pool!r} of link_losses has role serve; pools of that role have no links")
        for pool in self.pools:
            if pool.role == "encode" and pool.limits != (None, None):
                raise ValueError(f"pool {pool.name!r} encodes images, so it takes no max_prompt_tokens; leave it out")
        for scaler in self.autoscaler or ():
            if "kv" in scaler.goals and self.pools[self.pool_number(scaler.pool)].role == "encode":
                raise ValueError("an encode pool has no KV; scale it by metric queue or attainment")
        return self

    @property
    def encodes_apart(self) -> bool:
        """True if some pools only encode images, videos and audio."""
        return any(pool.role == "encode" for pool in self.pools)

    @property
    def prefills_apart(self) -> bool:
        """True if some pools only prefill and others only decode."""
        return any(pool.role == "prefill" for pool in self.pools)

    @property
    def reserves_first(self) -> bool:
        """True if decode replicas take KV blocks for a prompt before it is prefilled."""
        return self.decode_reserves == "before-prefill"

    def pool_number(self, name: str | None) -> int:
        """Return the index in `pools` of the pool called `name`; 0 for None."""
        return 0 if name is None else [pool.name for pool in self.pools].index(name)


def plain_fleet(replicas: int) -> FleetConfig:
    """Return a fleet of one pool with a round-robin router."""
    return FleetConfig(pools=(PoolConfig(replicas=replicas),))
