"""The request of `compare`: two sides on the same traffic, or two recorded sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from tokentwin.planning.deployments import described, with_settings
from tokentwin.planning.request import Request, StatedDeployment, Timing
from tokentwin.planning.traffic import Offered, waits_for_answers
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload
from tokentwin.traces.reshape import reshaped


class Side(Request):
    """The settings of one side: a deployment, changes to its fields, and settings of the run.

    `settings` maps paths of fields, such as `policy`, `scheduler.max_num_seqs` or `fleet.router`, to values. A setting
    of the scheduler may be given without `scheduler.`.
    """

    deployment: StatedDeployment | None = None
    settings: dict[str, Any] = Field({})
    replicas: int | None = Field(None, ge=1, le=100_000)
    router: str = ""
    gpu: str | None = None
    calibration: str | None = None

    def deployed(self, base: Deployment) -> Deployment:
        """Return the side's deployment. Raises a UserError that names a wrong setting."""
        return with_settings(described(self.deployment, base), self.settings)


class _Judged(Request):
    """The latency bounds that requests should meet, and the change of a latency that counts as a gain or loss."""

    bounds: dict[str, float] = Field(
        {}, description="latency bounds in ms; the share of requests within them is also compared"
    )
    threshold: float = Field(
        0.05, ge=0, le=10, description="relative change of a request's latency that counts as a gain or a loss"
    )


class CompareRequest(Offered, _Judged):
    """Two sides on the same traffic; synthetic traffic is generated once for each of `seeds` seeds."""

    a: Side
    b: Side
    seeds: int = Field(1, ge=1, le=10_000, description="number of seeds; each side is simulated once with each seed")
    warm_up_s: float | None = Field(
        None, gt=0, le=1e9, description="requests of the first N seconds are served, but left out of all figures"
    )
    timing: Timing

    def workloads(self) -> list[Workload]:
        """Return the workload of each run, which both sides serve. Raises UserError for a workload without requests."""
        if self.seeds > 1 and self.recorded:
            remedy = "must be 1 for a recorded trace; give a YAML specification to simulate several seeds"
            raise UserError("seeds", self.seeds, remedy)
        made = [self.workload(number) for number in range(self.seeds)]
        if not all(workload.requests for workload in made):
            raise UserError("traffic", made[0].name, "holds no requests")
        if self.warm_up_s is not None:
            if any(map(waits_for_answers, made)):
                remedy = "needs the same arrivals in A and B, but these clients wait for answers; leave it out"
                raise UserError("warm-up", self.warm_up_s, remedy)
            made = [reshaped(workload, warm_up_s=self.warm_up_s) for workload in made]
        return made


class CompareRecordingsRequest(_Judged):
    """Two recordings, or two directories of them. If `timing` is given, the same runs are also simulated.

    Attributes:
        stamps: time when each side was last written, so that a newer recording in the same place is another request
    """

    a: Path
    b: Path
    stamps: tuple[int, int] | None = None
    timing: Timing | None = None
