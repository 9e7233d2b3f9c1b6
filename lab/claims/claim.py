"""A claim as a file: the sentence, its meaning as an experiment, its expected range, and the cases of the test.

The experiment is one figure of a simulated deployment, or how many times better it is with a `change` than with the
`baseline`. A case sets some of the experiment's fields, by dotted path, and says in words what it sets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from planning.claims.document import Holds
from planning.deployments import completed, served
from planning.request import Request, StatedDeployment
from planning.settings import overridden
from planning.traffic import Offered
from serving.data_file import read_yaml
from serving.deployments.config import parse
from serving.deployments.engines import with_engine_defaults
from serving.deployments.gpu_spec import find_gpu
from serving.errors import UserError
from serving.metrics import check_slo

Settings = dict[str, Any]  # values by dotted path


class Experiment(Request):
    """A measurement of a deployment under some traffic.

    `figure` is a metric and its statistic (`ttft_ms.p50`), a metric of the whole run (`output_throughput`), or one of
    `lab.claims.figures`. For two sides it is how many times better the change is.
    """

    figure: str = Field(description="what is measured")
    gpu: str = Field("H100", description="GPU whose kernel tables time the steps")
    deployment: StatedDeployment | None = Field(None, description="what is served, as in a deployment's YAML file")
    replicas: int | None = Field(None, ge=1, le=1000, description="engines behind the router")
    router: str = Field("", description="router, by name")
    offered: Offered | None = Field(None, description="the traffic")
    as_fast_as: Settings | None = Field(
        None, description="what a run sets, by path, at whose rate of finished requests these arrive"
    )
    slo: dict[str, float] = Field({}, description="bounds in ms that count for figures that need them")
    longest_prompt: int | None = Field(None, ge=1, description="measure only requests with prompts of up to so many")
    tokens: int = Field(8192, ge=1, description="tokens of a sequence, for figures of its KV")
    baseline: Settings | None = Field(None, description="what the first side sets, by path")
    change: Settings = Field({}, description="what the second side sets")

    @field_validator("slo")
    @classmethod
    def _known_bounds(cls, slo: dict[str, float]) -> dict[str, float]:
        return check_slo(slo)

    @property
    def paced_by(self) -> Experiment | None:
        """The run whose rate of finished requests is the rate of these arrivals, if there is one."""
        if self.as_fast_as is None:
            return None
        alone = {name: value for name, value in self.as_json().items() if name != "as_fast_as"}
        return parse(Experiment, overridden(alone, self.as_fast_as), "as_fast_as")

    @property
    def sides(self) -> list[Experiment]:
        """The baseline and the change; or the one deployment, if nothing is compared."""
        if self.baseline is None:
            return [self]
        alone = self.model_dump(mode="json", exclude_none=True, exclude={"baseline", "change"})
        return [parse(Experiment, overridden(alone, side), "experiment") for side in (self.baseline, self.change)]

    @property
    def serves(self) -> Any:
        """The deployment, completed by the defaults for a GPU and by its engine's defaults."""
        return with_engine_defaults(completed(self.deployment, served()), find_gpu(self.gpu))


class Expected(Request):
    """The range in which the figure should lie."""

    least: float | None = None
    most: float | None = None
    unit: str = Field("times", description="unit of the figure; times, if two sides are compared")

    @model_validator(mode="after")
    def _says_something(self) -> Expected:
        if self.least is None and self.most is None:
            raise ValueError("give least, most or both")
        if self.least is not None and self.most is not None and self.least > self.most:
            raise ValueError(f"least must be at most {self.most:g}, which is most")
        return self

    def judge(self, low: float, high: float) -> Holds:
        """Return whether all of the interval, nothing of it, or a part lies in the expected range."""
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
    """One set of conditions."""

    when: str = Field(min_length=1, description="the conditions in words, after 'when'")
    set: Settings = Field({}, description="the fields of the experiment that say so, by path")


class OnEngine(Case):
    """The experiment at the size of one machine: on its GPU in bfloat16 or, without one, on its CPU in float32."""

    gpu: bool = Field(False, description="whether a machine without a GPU cannot tell")


class BreakEven(Request):
    """A number of the experiment, and the range in which to search where a change pays and where the claim holds."""

    path: str = Field(description="which number, by path")
    least: float
    most: float
    what: str = Field(min_length=1, description="what it is, after the numbers")
    of: Literal["both", "baseline", "change"] = Field("both", description="which sides have it")

    @property
    def whole(self) -> bool:
        """True if it is a count."""
        return self.least == int(self.least) and self.most == int(self.most) and self.most > 1


class Claim(Request):
    """A sentence that people say, and its test. Raises UserError if a case makes no experiment."""

    claim: str = Field(min_length=1, description="the sentence, as people say it")
    means: str = Field(min_length=1, description="what it means as an experiment")
    expects: Expected
    experiment: Settings = Field(description="the experiment; its fields are those of `Experiment`")
    cases: tuple[Case, ...] = Field(min_length=1)
    terms: bool = Field(False, description="also say what E2E is made of, where requests come one at a time")
    break_even: BreakEven | None = Field(None, description="where the experiment's change begins to pay, cases aside")
    engine: OnEngine | None = Field(None, description="the experiment on the real engine of this machine")
    not_on_engine: str = Field("", description="why there is none")
    learnt: str = Field("", description="what a reader may take from it")

    def experiments(self) -> Iterator[tuple[Case, Experiment]]:
        """Yield every case, and the experiment in it."""
        for case in self.cases:
            yield case, parse(Experiment, overridden(self.experiment, case.set), "experiment")


def load_claims(directory: str | Path | None = None, only: tuple[str, ...] = ()) -> dict[str, Claim]:
    """Return the claims of a folder of YAML files, or the bundled ones, by name in order.

    Raises UserError for a file that is not a claim, and for a name in `only` that no claim has.
    """
    folder = Path(directory) if directory is not None else Path(__file__).with_name("claims")
    paths = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    if not paths:
        raise UserError("claims", str(folder), "holds no YAML file; see lab/results/claims.md")
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
