"""Rung 4, step by step: another engine's iterations, predicted from kernels and from iterations before and after.

*Blind* knows nothing of this engine. *Anchored* has its correction fitted on the first and the last third of the log in
time; both are scored on the middle third.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field

from calibration.iteration_fit import PricedLog, StepErrors, middle_third, score_middle_third
from calibration.iteration_log import read_iteration_log
from calibration.predict import blind, kernels
from serving.config import Deployment, parse
from serving.errors import UserError
from serving.model_catalogue import find_model


class StepTarget(BaseModel):
    """Bounds on the absolute error of the anchored column, in percent of the measured."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    median_pct: float = Field(gt=0)
    p95_pct: float = Field(gt=0)


class StepCase(BaseModel):
    """A per-iteration log and the engine that wrote it; `targets` by regime: prefill, decode, mixed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    title: str
    source: str
    engine: str
    gpu: str
    deployment: dict[str, Any]
    file: str
    targets: dict[str, StepTarget] = {}
    notes: str = ""


@dataclass(frozen=True)
class StepOutcome:
    """Errors by regime on the middle third, in both columns."""

    case: StepCase
    blind: Mapping[str, StepErrors]
    anchored: Mapping[str, StepErrors]

    @property
    def missed(self) -> list[str]:
        """Regimes whose target is not met."""
        return [
            name
            for name, target in self.case.targets.items()
            if name not in self.anchored
            or self.anchored[name].median_pct > target.median_pct
            or self.anchored[name].p95_pct > target.p95_pct
        ]


def load_step_cases(folder: Path | None = None) -> list[StepCase]:
    """The step cases of `folder`, or the bundled ones. Raises UserError that names the file and the field."""
    where = Path(str(files("calibration.external.step_cases"))) if folder is None else folder
    cases = []
    for path in sorted(where.glob("*.yaml")):
        try:
            data = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UserError("case", str(path), f"cannot be read: {str(error).splitlines()[0]}") from None
        cases.append(parse(StepCase, data, where=path.name))
    return cases


def score_steps(case: StepCase, data: Path) -> StepOutcome:
    """Score a log under `data`. Raises UserError when it cannot be read."""
    deployment = parse(Deployment, {"device": "cuda", **case.deployment}, where=f"{case.name}.deployment")
    log = read_iteration_log(data / case.file)
    priced = PricedLog(log, find_model(deployment.model), deployment, kernels(case.gpu))
    return StepOutcome(case, priced.score(blind().correction, middle_third(log)), score_middle_third(priced))
