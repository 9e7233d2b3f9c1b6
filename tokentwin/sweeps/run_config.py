"""Everything one simulated run depends on: two runs with equal configurations give equal numbers.

Its JSON form, defaults filled in, is what a run of a sweep is identified by.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from serving.config import Deployment
from serving.fleet import RouterConfig
from serving.workload import Workload


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TraceWorkload(_Settings):
    """The requests of a trace file."""

    trace: str = Field(min_length=1, description="a trace in any format, or a recording's directory")
    limit: int | None = Field(None, ge=1, description="only the first so many requests")
    rate_scale: float | None = Field(None, gt=0, description="multiply the arrival rate")
    spread_ticks: bool = Field(False, description="spread arrivals that share a timestamp evenly over the tick")


class RunConfig(_Settings):
    """One run: what is offered, to what, and how its steps are timed.

    `workload` is a `TraceWorkload` when it names a `trace`, and otherwise what `tokentwin trace synth` takes.
    """

    deployment: Deployment = Field(description="the deployment, as in its own file")
    gpu: str | None = Field(None, description="GPU of the catalogue whose kernel tables time the steps")
    calibration: str | None = Field(None, description="directory made by `tokentwin calibrate`")
    workload: dict[str, Any] = Field(description="a trace, or a specification of a synthetic workload")
    replicas: int | None = Field(None, ge=1, le=100_000, description="engines behind the router; null: 1, or the fleet")
    router: RouterConfig | None = Field(None, description="a name, or name and settings; null: round-robin")
    prices: dict[str, Annotated[float, Field(ge=0, lt=1e9)]] = Field(
        {}, description="dollars per GPU-hour by name, instead of the catalogue's; our own engine's is cpu or cuda"
    )
    slo: dict[str, float] = Field({}, description="bounds in ms for goodput and attainment, e.g. ttft_ms: 200")

    @field_validator("router", mode="before")
    @classmethod
    def _a_name_alone(cls, router: Any) -> Any:
        return {"name": router} if isinstance(router, str) else router

    @field_validator("slo")
    @classmethod
    def _known_bounds(cls, slo: dict[str, float]) -> dict[str, float]:
        from traces.run_metrics import check_slo

        return check_slo(slo)

    @field_validator("prices")
    @classmethod
    def _of_known_gpus(cls, prices: dict[str, float]) -> dict[str, float]:
        from serving.gpu_spec import gpus

        unknown = prices.keys() - {*gpus(), "cpu", "cuda"}
        if unknown:
            raise ValueError(f"{min(unknown)} is no GPU of the catalogue; a GPU's own file says its price")
        return prices

    @field_validator("workload")
    @classmethod
    def _complete(cls, workload: dict[str, Any]) -> dict[str, Any]:
        from serving.config import parse
        from traces.synth import parse_spec

        if "trace" in workload:
            return parse(TraceWorkload, workload, where="workload").model_dump(mode="json")
        return parse_spec(workload, where="workload").model_dump(mode="json")

    @model_validator(mode="after")
    def _one_way_to_say_it(self) -> RunConfig:
        if self.gpu is None and self.calibration is None:
            raise ValueError("give a gpu or a calibration, which time the steps")
        if self.deployment.fleet is not None and (self.replicas or self.router):
            raise ValueError("a deployment with a fleet says replicas and router there; leave them out here")
        return self

    def offered(self) -> Workload:
        """The workload. Raises UserError when its trace cannot be read."""
        from traces.reader import read_workload
        from traces.reshape import reshaped
        from traces.synth import parse_spec, synthesise
        from traces.ticks import spread_ticks

        if "trace" not in self.workload:
            return synthesise(parse_spec(self.workload, where="workload"))
        source = TraceWorkload.model_validate(self.workload)
        workload = read_workload(source.trace)
        if source.spread_ticks:
            workload = spread_ticks(workload)
        return reshaped(workload, limit=source.limit, rate_scale=source.rate_scale)
