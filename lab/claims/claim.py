"""A claim as a file: the sentence, its meaning as an experiment, its expected range, and the tested cases.

The experiment is one figure of a simulated deployment, or the factor by which a `change` improves the figure of the
`baseline`. A case sets some fields of the experiment by dotted path, and describes its conditions in words.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from tokentwin.planning.claims.document import Holds
from tokentwin.planning.deployments import described, overridden, served
from tokentwin.planning.request import Request, StatedDeployment
from tokentwin.planning.traffic import Offered
from tokentwin.serving.data_file import read_yaml
from tokentwin.serving.deployments.config import parse
from tokentwin.serving.deployments.engine_defaults import with_engine_defaults
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.errors import UserError
from tokentwin.serving.metrics import check_slo

Settings = dict[str, Any]  # values by dotted path


class Experiment(Request):
    """A measurement of a deployment under some traffic.

    `figure` is a metric and its statistic (`ttft_ms.p50`), a metric of the whole run (`output_throughput`), or one of
    `lab.claims.figures`. If two sides are compared, the result is the factor by which the change is better.
    """

    figure: str = Field(description="the figure that is measured")
    gpu: str = Field("H100", description="GPU whose kernel tables time the steps")
    deployment: StatedDeployment | None = Field(None, description="the deployment, as in a deployment's YAML file")
    replicas: int | None = Field(None, ge=1, le=1000, description="number of engines behind the router")
    router: str = Field("", description="name of the router")
    offered: Offered | None = Field(None, description="the traffic")
    as_fast_as: Settings | None = Field(
        None,
        description="settings of another run by dotted path; its rate of finished requests is the arrival rate here",
    )
    slo: dict[str, float] = Field({}, description="latency bounds in ms, for figures that need bounds")
    longest_prompt: int | None = Field(None, ge=1, description="maximum prompt tokens of requests that are measured")
    tokens: int = Field(8192, ge=1, description="tokens of a sequence, for figures about its KV")
    baseline: Settings | None = Field(None, description="settings of the first side, by dotted path")
    change: Settings = Field({}, description="settings of the second side, by dotted path")

    @field_validator("slo")
    @classmethod
    def _known_bounds(cls, slo: dict[str, float]) -> dict[str, float]:
        return check_slo(slo)

    @property
    def paced_by(self) -> Experiment | None:
        """The other run whose rate of finished requests is this experiment's arrival rate; None if there is none."""
        if self.as_fast_as is None:
            return None
        alone = {name: value for name, value in self.as_json().items() if name != "as_fast_as"}
        return parse(Experiment, overridden(alone, self.as_fast_as), "as_fast_as")

    @property
    def sides(self) -> list[Experiment]:
        """The baseline and the change, or only this experiment if nothing is compared."""
        if self.baseline is None:
            return [self]
        alone = self.model_dump(mode="json", exclude_none=True, exclude={"baseline", "change"})
        return [parse(Experiment, overridden(alone, side), "experiment") for side in (self.baseline, self.change)]

    @property
    def serves(self) -> Any:
        """The deployment, described by the defaults for a GPU and by its engine's defaults."""
        return with_engine_defaults(described(self.deployment, served()), find_gpu(self.gpu))[0]


class Expected(Request):
    """The range in which the figure should lie."""

    least: float | None = None
    most: float | None = None
    unit: str = Field("times", description="unit of the figure; `times` if two sides are compared")

    @model_validator(mode="after")
    def _says_something(self) -> Expected:
        if self.least is None and self.most is None:
            raise ValueError("give least, most or both")
        if self.least is not None and self.most is not None and self.least > self.most:
            raise ValueError(f"least must be at most {self.most:g}, which is most")
        return self

    def judge(self, low: float, high: float) -> Holds:
        """Return "yes" if the whole interval lies in the expected range, "no" if none of it does, and else "open"."""
        least = -math.inf if self.least is None else self.least
        most = math.inf if self.most is None else self.most
        if least <= low and high <= most:
            return "yes"
        return "no" if high < least or low > most else "open"

    def __str__(self) -> str:
        if self.least is not None and self.least == self.most:
            return f"{self.least:g} {self.unit}"
        if self.least is not None and self.most is not None:
            return f"{self.least:g} to {self.most:g} {self.unit}"
        return f"at least {self.least:g} {self.unit}" if self.most is None else f"at most {self.most:g} {self.unit}"


class Case(Request):
    """One set of conditions under which a claim is tested."""

    when: str = Field(min_length=1, description="the conditions in words that follow 'when'")
    set: Settings = Field({}, description="the settings of the experiment under these conditions, by dotted path")


class OnEngine(Case):
    """The experiment at a size for one machine: on its GPU in bfloat16 or, without a GPU, on its CPU in float32."""

    gpu: bool = Field(False, description="whether the experiment needs a GPU")


class BreakEven(Request):
    """A setting of the experiment, and the range of its values in which to search where a change pays."""

    path: str = Field(
        description="dotted path of the setting in the experiment, e.g. "
        "deployment.scheduler.long_prefill_token_threshold"
    )
    least: float
    most: float
    what: str = Field(min_length=1, description="the number in words that follow its values")
    of: Literal["both", "baseline", "change"] = Field(
        "both", description="sides of the experiment that have the number"
    )

    @property
    def whole(self) -> bool:
        """True if the setting takes whole numbers only."""
        return self.least == int(self.least) and self.most == int(self.most) and self.most > 1


class Claim(Request):
    """A claim that people make, and its test. Raises UserError if a case does not give a valid experiment."""

    claim: str = Field(min_length=1, description="the claim in the words that people use")
    means: str = Field(min_length=1, description="the claim's meaning as an experiment")
    expects: Expected
    experiment: Settings = Field(description="the experiment; its fields are those of `Experiment`")
    cases: tuple[Case, ...] = Field(min_length=1)
    terms: bool = Field(False, description="also show the parts of E2E, for requests that arrive one at a time")
    break_even: BreakEven | None = Field(
        None, description="the number at which the experiment's change begins to pay, without the cases"
    )
    engine: OnEngine | None = Field(None, description="the experiment on the real engine of this machine")
    not_on_engine: str = Field("", description="the reason why there is no experiment on the real engine")
    learnt: str = Field("", description="the lesson for the reader")

    def experiments(self) -> Iterator[tuple[Case, Experiment]]:
        """Yield every case, and the experiment under its conditions."""
        for case in self.cases:
            yield case, parse(Experiment, overridden(self.experiment, case.set), "experiment")


def load_claims(directory: str | Path | None = None, only: tuple[str, ...] = ()) -> dict[str, Claim]:
    """Return the claims of a folder of YAML files, or the bundled ones, by name in order.

    Raises UserError for a file that is not a claim, and for a name in `only` that no claim has.
    """
    folder = Path(directory) if directory is not None else Path(__file__).with_name("claims")
    paths = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    if not paths:
        raise UserError("claims", str(folder), "has no YAML file; see lab/results/claims.md")
    if unknown := [name for name in only if name not in paths]:
        raise UserError("only", unknown[0], f"is no claim; choose from {', '.join(paths)}")
    claims = {
        name: parse(Claim, read_yaml(path, "claim"), str(path))
        for name, path in paths.items()
        if not only or name in only
    }
    for name, claim in claims.items():
        try:
            for _, experiment in claim.experiments():
                assert experiment.sides
        except UserError as error:
            raise UserError(f"claim {name}: {error.field}", error.value, error.remedy) from None
    return claims
