"""A calibration of an engine other than ours: kernels of its GPU, a correction learnt from its logs, host times.

The file says what it was learnt from, so that a result made with it can say so, too. Without any measurement of the
engine it is `blind`: kernel tables and the correction that other engines taught.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

from pydantic import ConfigDict

from calibration.kernels.times import KernelTimes
from calibration.steps.calibration_file import Price, checked, read, save
from calibration.steps.correction import ADDED, FACTORS, Correction
from calibration.steps.interval import Factors, StepInterval
from calibration.steps.operation_cost import HostTimes, OperationCost
from calibration.steps.pipeline_cost import PipelineCost
from serving.deployments.config import Deployment, parse
from serving.deployments.model_spec import ModelSpec
from serving.errors import UserError

FILE = "engine.json"
_FORMAT = 2


@dataclass(frozen=True)
class ExternalCalibration:
    """The knowledge of one engine on one GPU.

    Attributes:
        gpu, deployment: the catalogued GPU, and the deployment it was learnt with, as JSON, with the engine if known
        correction, host: correction learnt from whole steps; CPU time between steps
        interval: factors of the predicted time between which 9 of 10 runs lie
        prompt_interval: the same for the time that prompts add to a step, if it is known separately
        request_ms: time that a server and a client add to TTFT, which no simulation has; `request_interval` is its
            interval
        untaught: the part that no measurement taught; empty if all that matters was measured
        residuals: held-out errors in percent by regime: steps, median, p95
        source, created: what it was learnt from, and when
    """

    gpu: str
    deployment: str
    correction: Correction
    host: HostTimes
    interval: Factors
    source: str
    created: str
    residuals: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    prompt_interval: Factors | None = None
    request_ms: Price = 0.0
    request_interval: Factors = (1.0, 1.0)
    untaught: str = ""
    format: int = _FORMAT

    __pydantic_config__ = ConfigDict(extra="forbid")

    @property
    def id(self) -> str:
        """Twelve hexadecimal digits that change with everything that a prediction depends on."""
        known = (self.gpu, self.correction, self.host, self.step_interval)
        contents = repr((*known, dict(self.correction.wider)) if self.correction.wider else known)
        return blake2b(contents.encode(), digest_size=6).hexdigest()

    @property
    def step_interval(self) -> StepInterval:
        """Both intervals, of decode steps and of prompts."""
        return StepInterval(self.interval, self.prompt_interval or self.interval)

    def save(self, directory: Path) -> None:
        """Write `engine.json` into `directory`, whole or not at all."""
        save(self, directory / FILE)

    @classmethod
    def load(cls, path: Path) -> ExternalCalibration:
        """Read the file `path`; raise UserError if it is of another make or damaged."""
        loaded = checked(cls, read(path, _FORMAT), str(path))
        numbers = {**loaded.correction.factors, **loaded.correction.added_ns}
        if missing := [name for name in (*FACTORS, *ADDED) if name not in numbers]:
            raise UserError("calibration", str(path), f"has no value for {missing[0]}; calibrate again")
        try:
            _ = loaded.learnt_as
        except ValueError as error:
            raise UserError("calibration", str(path), f"is damaged ({error}); calibrate again") from None
        return loaded

    @property
    def learnt_as(self) -> Deployment:
        """The parsed `deployment`."""
        return parse(Deployment, json.loads(self.deployment), where="calibration.deployment")

    def differs(self, deployment: Deployment) -> str:
        """Return the first setting that affects times and is different in `deployment`; empty if there is none.

        If `deployment` states no release, it counts as the release that the calibration was learnt with.
        """
        then, now = self.learnt_as, deployment.engine_name
        if now.name != then.engine_name.name or now.version not in ("", then.engine_name.version):
            return f"engine {then.engine_name}"
        longest = deployment.scheduler.max_model_len  # max_model_len changes no time
        before, after = (
            one.rescheduled(max_model_len=longest).timing().model_dump(exclude={"engine"}) for one in (then, deployment)
        )
        name = next((name for name in before if before[name] != after.get(name)), "")
        return "an engine of another loop" if name == "scheduler" else name and f"{name} {before[name]}"

    def cost(self, model: ModelSpec, deployment: Deployment, kernels: KernelTimes) -> OperationCost:
        """Return the cost model of `deployment`; if it differs from the learnt one, nothing is validated."""
        same = self.gpu == kernels.gpu.name and not self.differs(deployment)
        correction = self.correction if same else replace(self.correction, domain={})
        kind = PipelineCost if deployment.pipeline_parallel_size > 1 else OperationCost
        return kind(model, deployment, kernels, correction, self.host, self.step_interval, self.untaught)
