"""A plan asked for as plain values: what a page sends to a job, and what names the job."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated

from pydantic import Field

from dashboard.request import Request
from serving.config import Deployment
from serving.errors import UserError
from serving.gpu_spec import find_gpu
from serving.workload import Workload
from tokentwin.planning.engines import Engine, RuledOut, candidate_engines, long_enough
from tokentwin.planning.objectives import parse_objectives
from tokentwin.planning.plan import Limits
from tokentwin.planning.pricing import KernelPricing
from tokentwin.planning.traffic import BUSIEST_S, planned_traffic, specified_traffic
from tokentwin.planning.trial import Question
from traces.reader import read_workload
from traces.synth import SynthSpec

# Of one plan: every one is simulated on each fleet that is tried, some twenty times in all, in what is then an hour.
MOST_REQUESTS = 100_000
_Price = Annotated[float, Field(gt=0)]  # a price of nothing is no answer, but a mistake


class RecordedTraffic(Request):
    """The busiest `window_s` seconds of a trace, arriving `rate_scale` times as fast."""

    path: Path
    window_s: float = Field(BUSIEST_S, gt=0, le=1e9)
    rate_scale: float = Field(1, gt=0, le=1e6)

    def workload(self) -> Workload:
        """Its requests. Raises UserError as the readers do."""
        return planned_traffic(read_workload(self.path), self.window_s, self.rate_scale)


class PlanRequest(Request):
    """What may serve, what arrives, and what must hold.

    `prices` are dollars per GPU-hour, not the catalogue's. `vary` has the values of other settings of the deployment
    that candidates have, in every combination, as `tokentwin plan --vary`; what it leaves out is as usual.
    """

    model: str
    gpus: tuple[str, ...]
    tensor_parallel_sizes: tuple[int, ...]
    prices: dict[str, _Price] = Field({})
    vary: dict[str, tuple[bool | int | str, ...]] | None = None
    traffic: SynthSpec | RecordedTraffic
    slos: tuple[str, ...]
    spares: int = Field(0, ge=0, le=10_000)
    router: str = "least-requests"
    most: int = Field(1024, ge=1, le=100_000)

    @property
    def limits(self) -> Limits:
        return Limits(self.most, self.spares)

    def workload(self) -> Workload:
        """The requests, in a list. Raises UserError when they are too many, of a specification before any is made."""
        if not isinstance(self.traffic, RecordedTraffic):
            _few_enough(self.traffic.expected_requests, "lower the rate, or simulate fewer minutes")
            return planned_traffic(specified_traffic(self.traffic), 1e9, None)
        workload = self.traffic.workload()
        _few_enough(sum(1 for _ in workload.requests), "take a shorter stretch of the trace")
        return workload

    def glance(self, most: int) -> Workload:
        """The first of the requests, up to `most` of a specification; those of a trace are there already, all of them.

        Raises UserError as `workload` does.
        """
        if isinstance(self.traffic, RecordedTraffic) or self.traffic.expected_requests <= most:
            return self.workload()
        _few_enough(self.traffic.expected_requests, "lower the rate, or simulate fewer minutes")
        return specified_traffic(self.traffic, most)

    def question(self, workload: Workload) -> Question:
        """What every trial on `workload` has in common. Raises UserError for objectives that are none."""
        requests = sum(1 for _ in workload.requests)
        return Question(workload, requests, parse_objectives(self.slos), KernelPricing(), self.router)

    def candidates(self, workload: Workload) -> tuple[list[Engine], list[RuledOut]]:
        """Every combination of GPU and size, as vLLM would serve the model. Raises UserError for a name of nothing."""
        if not self.gpus or not self.tensor_parallel_sizes:
            raise UserError("gpu" if not self.gpus else "tp", "none", "choose at least one candidate")
        base = Deployment(model=self.model, device="cuda", gpu_memory_utilization=0.9)
        gpus = {name: find_gpu(name) for name in self.gpus}
        vary = self.vary or {}
        variations = [dict(zip(vary, values, strict=True)) for values in product(*vary.values())]
        return candidate_engines(
            long_enough(base, workload), gpus, self.tensor_parallel_sizes, [base.policy], self.prices, variations
        )


def _few_enough(requests: float, remedy: str) -> None:
    if requests > MOST_REQUESTS:
        raise UserError(
            "traffic", f"{requests:,.0f} requests", f"are too many to plan for; {MOST_REQUESTS:,} are allowed: {remedy}"
        )
