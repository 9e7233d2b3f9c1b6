"""The settings of slower memory for KV blocks, such as host memory or a disk (docs/kv-tiers.md)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from tokentwin.serving.settings import Settings


class KvTier(Settings):
    """One kind of memory of a replica, for all its devices, and the speed of its transfers. One GB is 10^9 bytes."""

    name: str = Field(min_length=1, description="name of the tier, unique in the deployment")
    capacity_gib: float = Field(gt=0, le=1e9, description="capacity in GiB")
    read_gb_s: float = Field(
        gt=0, le=1e9, description="GB/s of loads from this tier into the device's memory; loads run one after another"
    )
    write_gb_s: float = Field(
        gt=0,
        le=1e9,
        description="GB/s of writes to this tier from the next faster one or the device; writes run one after another",
    )
    latency_us: float = Field(0.0, ge=0, le=1e9, description="latency of a transfer in microseconds")


class KvTiersConfig(Settings):
    """Tiers, the fastest first. A full block is written to the first tier; blocks that do not fit move down."""

    tiers: tuple[KvTier, ...] = Field(min_length=1, description="the tiers, fastest first")
    preemption: Literal["swap", "recompute"] = Field(
        "swap", description="preempted requests; swap: load their KV from the tiers; recompute: compute their KV again"
    )
    kv_bytes_per_token: int | None = Field(
        None,
        ge=1,
        le=10**9,
        description="KV bytes of one token over all layers and devices; null: from the model's shapes",
    )

    @model_validator(mode="after")
    def _names_differ(self) -> KvTiersConfig:
        if len({tier.name for tier in self.tiers}) < len(self.tiers):
            raise ValueError("two tiers have the same name; give each its own")
        return self
