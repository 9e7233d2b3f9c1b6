"""A calibration of an engine that is not ours: kernels of its GPU, a correction learnt from its logs, host times.

The file says what it was learnt from, so that a result made with it can. Without any measurement of the engine it is
`blind`: kernel tables and the correction that other engines taught.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from calibration.kernels.times import KernelTimes
from calibration.steps.correction import ADDED, FACTORS, Correction
from calibration.steps.interval import Factors, StepInterval
from calibration.steps.launches import LaunchCost
from calibration.steps.operation_cost import HostTimes, OperationCost
from calibration.steps.pipeline_cost import PipelineCost
from serving.deployments.config import Deployment, parse
from serving.deployments.model_spec import ModelSpec
from serving.errors import UserError, reason
from serving.whole_file import whole_file

FILE = "engine.json"
_FORMAT = 1


@dataclass(frozen=True)
class ExternalCalibration:
    """What is known of one engine on one GPU.

    gpu, deployment     the catalogued GPU, and the deployment it was learnt with, as JSON, with the engine if known
    correction, host    what whole steps taught; the CPU time between them
    interval            factors of the predicted time between which 9 of 10 runs lie
    prompt_interval     the same of what prompts add to a step, where it is known apart
    request_ms          what a server and a client add to TTFT, which no simulation has; its interval
    untaught            what of it no measurement taught; empty where all that matters was
    residuals           held-out errors in percent by regime: steps, median, p95
    source, created     what it was learnt from, and when
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
    request_ms: float = 0.0
    request_interval: Factors = (1.0, 1.0)
    untaught: str = ""
    format: int = _FORMAT

    @property
    def id(self) -> str:
        """Twelve hexadecimal digits that change with everything a prediction depends on."""
        contents = repr((self.gpu, self.correction, self.host, self.step_interval))
        return blake2b(contents.encode(), digest_size=6).hexdigest()

    @property
    def step_interval(self) -> StepInterval:
        """Both intervals."""
        return StepInterval(self.interval, self.prompt_interval or self.interval)

    def save(self, directory: Path) -> None:
        """Write `engine.json` into `directory`, whole or not at all."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with whole_file(directory / FILE) as file:
                file.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError("out", str(directory), f"cannot be written: {reason(error)}") from None

    @classmethod
    def load(cls, path: Path) -> ExternalCalibration:
        """Read the file `path`. Raises UserError when it is of another make or damaged."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError("calibration", str(path), f"cannot be read: {reason(error)}") from None
        except ValueError as error:
            raise UserError("calibration", str(path), f"is not JSON: {error}") from None
        return cls.read(data, str(path))

    @classmethod
    def read(cls, data: Any, where: str) -> ExternalCalibration:
        """From what a file holds. Raises UserError when it is of another make or damaged."""
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise UserError("calibration", where, f"is not an engine calibration of format {_FORMAT}; calibrate again")
        try:
            data = {**data, "correction": _correction(data["correction"])}
            data["host"] = HostTimes(**_launches(data["host"]))
            data["interval"] = _factors(data["interval"])
            if data.get("prompt_interval") is not None:
                data["prompt_interval"] = _factors(data["prompt_interval"])
            if "request_interval" in data:
                data["request_interval"] = _factors(data["request_interval"])
            loaded = cls(**data)
            _check(loaded)
            deployment = json.loads(loaded.deployment)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise UserError("calibration", where, f"is damaged ({error}); calibrate again") from None
        parse(Deployment, deployment, where=f"{where}.deployment")
        return loaded

    @property
    def learnt_as(self) -> Deployment:
        """`deployment`, read."""
        return parse(Deployment, json.loads(self.deployment), where="calibration.deployment")

    def differs(self, deployment: Deployment) -> str:
        """What it was learnt with that decides over times and is otherwise in `deployment`; empty for nothing.

        A release that `deployment` does not state is taken to be the one of which it was learnt.
        """
        then, now = self.learnt_as, deployment.engine_name
        if now.name != then.engine_name.name or now.version not in ("", then.engine_name.version):
            return f"engine {then.engine_name}"
        longest = deployment.scheduler.max_model_len  # which changes no time
        before, after = (
            each.rescheduled(max_model_len=longest).timing().model_dump(exclude={"engine"})
            for each in (then, deployment)
        )
        name = next((name for name in before if before[name] != after.get(name)), "")
        return "an engine of another loop" if name == "scheduler" else name and f"{name} {before[name]}"

    def cost(self, model: ModelSpec, deployment: Deployment, kernels: KernelTimes) -> OperationCost:
        """The cost model of `deployment`; if it is another than the one it was learnt with, nothing is validated."""
        same = self.gpu == kernels.gpu.name and not self.differs(deployment)
        correction = self.correction if same else replace(self.correction, domain={})
        kind = PipelineCost if deployment.pipeline_parallel_size > 1 else OperationCost
        return kind(model, deployment, kernels, correction, self.host, self.step_interval, self.untaught)


def _correction(data: Mapping[str, Any]) -> Correction:
    domain = {name: (float(low), float(high)) for name, (low, high) in data["domain"].items()}
    return Correction(**{**data, "domain": domain})


def _launches(data: Mapping[str, Any]) -> dict[str, Any]:
    return {**data, "launches": LaunchCost(**data["launches"])} if "launches" in data else dict(data)


def _factors(data: Sequence[float]) -> Factors:
    low, high = data
    return float(low), float(high)


def _check(loaded: ExternalCalibration) -> None:
    numbers: dict[str, Any] = {**loaded.correction.factors, **loaded.correction.added_ns, **loaded.host.times_ns}
    numbers["request_ms"] = loaded.request_ms
    for name in (*FACTORS, *ADDED):
        if name not in numbers:
            raise ValueError(f"no value for {name}")
    for name, value in numbers.items():
        if not isinstance(value, int | float) or not 0 <= value < 1e12:
            raise ValueError(f"an impossible {name}, {value}")
    for low, high in loaded.step_interval:
        if not 0 < low <= 1 <= high < 1e3:
            raise ValueError(f"an impossible interval {(low, high)}")
