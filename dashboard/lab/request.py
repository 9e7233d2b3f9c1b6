"""What the Policy lab asks, as plain values: what a page sends to a job, and what names the job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from calibration.scenario import Scenario
from dashboard.lab.mixes import merged
from dashboard.plan_request import RecordedTraffic
from dashboard.request import Request
from serving.config import Deployment, parse
from serving.errors import UserError
from serving.model_catalogue import models
from serving.workload import Workload
from tokentwin.comparing import side_scenarios
from tokentwin.costs import Priced
from tokentwin.planning.engines import long_enough
from tokentwin.settings import with_settings
from traces.synth import SynthSpec

MOST_REQUESTS = 200_000  # of one run
MOST_IN_ALL = 1_000_000  # of all runs of a side, which are in memory together


class Timing(Request):
    """What times a step: a calibration's directory, or a GPU with a model of the catalogue on so many of them."""

    calibration: str | None = None
    gpu: str | None = None
    model: str | None = None
    tensor_parallel_size: int = Field(1, ge=1, le=64)


class Side(Request):
    """A whole deployment or, without one, settings that differ from what both sides have in common."""

    deployment: dict[str, Any] | None = None
    settings: dict[str, Any] = Field({})
    replicas: int | None = Field(None, ge=1, le=1000)
    router: str = ""

    def settle(self, base: Deployment) -> Deployment:
        """The side's deployment. Raises UserError that names the setting that is wrong."""
        if self.deployment is None:
            return with_settings(base, self.settings)
        return parse(Deployment, self.deployment, where="deployment")


class LabRequest(Request):
    """Two sides on the same traffic. `seeds` runs each where it is synthetic; bounds in ms, by metric, as attained."""

    a: Side
    b: Side
    traffic: tuple[SynthSpec, ...] | RecordedTraffic
    seeds: int = Field(1, ge=1, le=50)
    timing: Timing
    bounds: dict[str, float] = Field({})
    threshold: float = Field(0.05, ge=0, le=10)

    def check(self) -> None:
        """Raises UserError for a specification of too many requests, of which none is made here."""
        if isinstance(self.traffic, RecordedTraffic):
            return
        expected = sum(part.expected_requests for part in self.traffic)
        for count, most, where in ((expected, MOST_REQUESTS, ""), (expected * self.seeds, MOST_IN_ALL, " in all runs")):
            if count > most:
                raise UserError("traffic", f"{count:,.0f} requests{where}", f"are too many; {most:,} are allowed")

    def workloads(self) -> list[Workload]:
        """What both sides are offered, run by run. Raises UserError when that is nothing, or too much."""
        if isinstance(self.traffic, RecordedTraffic):
            made = [self.traffic.workload()]
        else:
            self.check()
            made = [
                merged([part.model_copy(update={"seed": part.seed + number}) for part in self.traffic])
                for number in range(self.seeds)
            ]
        for workload in made:
            count = sum(1 for _ in workload.requests)
            if not count or count > MOST_REQUESTS:
                raise UserError("traffic", f"{count:,} requests", f"must be 1 to {MOST_REQUESTS:,}")
        return made

    def scenarios(self, workloads: list[Workload]) -> tuple[list[list[Scenario]], list[Priced]]:
        """Both sides' scenarios, and what times them. Raises UserError when the two do not go together."""
        longest = Workload([request for workload in workloads for request in workload.requests])
        sides, prices = [], []
        for side in (self.a, self.b):
            scenarios, price = side_scenarios(
                workloads,
                self.timing.calibration,
                self.timing.gpu,
                lambda base, side=side: side.settle(self._base(base, longest)),
                side.replicas,
                side.router,
            )
            sides.append(scenarios)
            prices.append(price)
        return sides, prices

    def _base(self, base: Deployment, longest: Workload) -> Deployment:
        """What both sides have in common, with room for every request; a calibration brings its own deployment."""
        if self.timing.model is None:
            return base
        if self.timing.model not in models():
            raise UserError("model", self.timing.model, "is not in the catalogue")
        named = {"model": self.timing.model, "tensor_parallel_size": self.timing.tensor_parallel_size}
        return long_enough(base.model_copy(update=named), longest)


class RecordedRequest(Request):
    """Two recordings, or two directories of them; `timing` has the same runs simulated, to hold them against.

    stamps      when each was last written: a later recording at the same place is another question
    """

    a: Path
    b: Path
    stamps: tuple[int, int]
    timing: Timing | None = None
    bounds: dict[str, float] = Field({})
    threshold: float = Field(0.05, ge=0, le=10)
