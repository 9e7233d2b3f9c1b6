"""A scenario: all inputs of one simulated run, so that equal scenarios give equal numbers.

`tokentwin simulate` and the file of a sweep make scenarios. The JSON of a scenario, with its deployment resolved,
identifies a run of a sweep.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, field_validator, model_validator

from tokentwin.planning.deployments import described, with_room
from tokentwin.planning.made_up import NAME
from tokentwin.planning.request import GridCarbon, Pue, Request, StatedDeployment, TimedBy
from tokentwin.serving.deployments.config import Deployment, parse
from tokentwin.serving.deployments.fleet import RouterConfig
from tokentwin.serving.deployments.gpu_spec import gpus
from tokentwin.serving.metrics import check_slo
from tokentwin.serving.scheduler import find_policy
from tokentwin.serving.workload import Workload

if TYPE_CHECKING:
    from tokentwin.planning.priced_scenario import PricedScenario
    from tokentwin.traces.synth import SynthSpec


class TraceWorkload(Request):
    """The requests of a trace, or of a specification in a separate file."""

    trace: str = Field(
        min_length=1, description="a trace in any format, a recording, or a YAML specification for `trace synth`"
    )
    limit: int | None = Field(None, ge=1, description="use only the first N requests")
    rate_scale: float | None = Field(None, gt=0, description="multiply the arrival rate by this factor")
    warm_up_s: float | None = Field(
        None, gt=0, le=1e9, description="requests of the first N seconds are served, but left out of all figures"
    )
    spread_ticks: bool = Field(
        False, description="spread arrivals with equal timestamps evenly until the next timestamp"
    )


class Scenario(Request):
    """One run: its workload, its deployment, and the source of its step times.

    `workload` is a `TraceWorkload` if it names a `trace`, otherwise a specification for `tokentwin trace synth`.
    """

    deployment: StatedDeployment | None = Field(
        None, description="the deployment, as in a deployment's YAML file; by default the calibration's or a GPU's"
    )
    gpu: str | None = Field(None, description="GPU to simulate; step times come from measured times of its kernels")
    calibration: TimedBy = None
    workload: dict[str, Any] = Field(description="a trace, or the specification of a synthetic workload")
    replicas: int | None = Field(
        None,
        ge=1,
        le=100_000,
        description="number of engines behind the router (with a fleet: in its first pool); by default 1, or the "
        "fleet's number",
    )
    router: RouterConfig | None = Field(None, description="name of the router; by default round-robin")
    prices: dict[str, Annotated[float, Field(ge=0, lt=1e9)]] = Field(
        {},
        description="price in dollars per GPU-hour, instead of the catalogue's, e.g. H100=2.9; the name for the "
        "machine of our own engine is cpu or cuda (cuda=2.9)",
    )
    pue: Pue = None
    grid_gco2_per_kwh: GridCarbon = None
    slo: dict[str, float] = Field({}, description="latency bounds in ms for goodput and attainment, e.g. ttft_ms: 200")

    @field_validator("router", mode="before")
    @classmethod
    def _a_name_alone(cls, router: Any) -> Any:
        return {"name": router} if isinstance(router, str) else router

    @field_validator("slo")
    @classmethod
    def _known_bounds(cls, slo: dict[str, float]) -> dict[str, float]:
        return check_slo(slo)

    @field_validator("prices")
    @classmethod
    def _of_known_gpus(cls, prices: dict[str, float]) -> dict[str, float]:
        unknown = prices.keys() - {*gpus(), "cpu", "cuda"}
        if unknown:
            raise ValueError(f"{min(unknown)} is not a GPU of the catalogue; set the price in your own GPU's file")
        return prices

    @field_validator("workload")
    @classmethod
    def _complete(cls, workload: dict[str, Any]) -> dict[str, Any]:
        from tokentwin.traces.synth import parse_spec

        if "trace" in workload:
            return parse(TraceWorkload, workload, where="workload").model_dump(mode="json")
        return parse_spec(workload, where="workload").model_dump(mode="json")

    @model_validator(mode="after")
    def _one_way_to_say_it(self) -> Scenario:
        if self.gpu is None and self.calibration is None:
            raise ValueError("give gpu or calibration, to time the steps")
        if self.deployment is not None and self.deployment.fleet is not None and (self.replicas or self.router):
            raise ValueError("leave replicas and router out, because the deployment's fleet states both")
        return self

    def described(self) -> Deployment:
        """Return the deployment as stated, with what the calibration supplies, and room for made-up traffic.

        Raises UserError for settings that do not go together.
        """
        from tokentwin.planning.resolution import base_deployment
        from tokentwin.traces.synth import parse_spec, synthesise

        made = described(self.deployment, base_deployment(self.calibration))
        return with_room(made, synthesise(parse_spec(self.room))) if self.room else made

    @property
    def room(self) -> dict[str, Any] | None:
        """The workload, if it is made up, so that a deployment has room for its longest request; otherwise None."""
        return self.workload if self.workload.get("name") == NAME else None

    @property
    def synthetic(self) -> SynthSpec | None:
        """The specification in `workload`; None if it names a trace."""
        from tokentwin.traces.synth import parse_spec

        return None if "trace" in self.workload else parse_spec(self.workload, where="workload")

    def offered(self) -> Workload:
        """Return the workload. Raises UserError if its trace cannot be read."""
        from tokentwin.planning.traffic import is_specification
        from tokentwin.traces.formats.trace_file import read_workload
        from tokentwin.traces.reshape import reshaped, spread_ticks
        from tokentwin.traces.synth import read_spec, synthesise

        if (spec := self.synthetic) is not None:
            return synthesise(spec)
        source = TraceWorkload.model_validate(self.workload)
        specified = is_specification(source.trace)
        workload = synthesise(read_spec(source.trace)) if specified else read_workload(source.trace)
        if source.spread_ticks:
            workload = spread_ticks(workload)
        return reshaped(workload, limit=source.limit, rate_scale=source.rate_scale, warm_up_s=source.warm_up_s)

    def priced(self, whole: Deployment | None = None) -> PricedScenario:
        """Return the scenario ready to be simulated; `whole` is its deployment, if that was resolved before.

        Raises UserError if settings do not go together.
        """
        from tokentwin.planning.pooling import check_pooling
        from tokentwin.planning.priced_scenario import price_scenario, with_fleet
        from tokentwin.sim.router import find_router

        deployment = with_fleet(whole or self.described(), self.replicas, self.router)
        priced = price_scenario(Workload(()), self.calibration, self.gpu, deployment, prices=self.prices)
        for pool in priced.all_pools:
            find_policy(pool.deployment.policy)
        find_router(priced.fleet.router.name, **priced.fleet.router.settings)
        site = {"pue": self.pue, "grid_gco2_per_kwh": self.grid_gco2_per_kwh}
        priced = replace(priced, site={name: value for name, value in site.items() if value is not None})
        priced.check_site()
        offered = self.offered()  # last, since reading takes longest
        check_pooling(offered, (pool.deployment.model for pool in priced.all_pools), self.slo)
        return replace(priced, workload=offered)
