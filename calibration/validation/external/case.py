"""A case file describes an engine that ran, its measurement, and the maximum error of a prediction.

A new measured run of a known format needs only a case file. Settings of the engine have the names of a deployment file.
vLLM's defaults at the engine's version are written out, because the measurements do not state them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from tokentwin.calibration.steps.evidence import Origin
from tokentwin.serving.data_file import read_yaml
from tokentwin.serving.deployments.config import Deployment, merged, parse
from tokentwin.serving.deployments.engines import EngineName
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.errors import UserError
from tokentwin.serving.settings import Settings
from tokentwin.traces.measured.formats import measured_format
from tokentwin.traces.measured.run import LATENCIES, RATES, STATISTICS, MeasuredFormat, MeasuredRun
from tokentwin.traces.recording import Recording

_MEANS_AND_RATES = (*(f"{name}.mean" for name in LATENCIES), *RATES)
_SHOWN = (*(f"{name}.{statistic}" for name in LATENCIES for statistic in STATISTICS), *RATES)
_CLIENTS_TIMES = "Latencies are a client's: the network and the server's HTTP, tokeniser and detokeniser are in them."

Column = Literal["blind", "anchored"]


class Target(Settings):
    """A bound on the error of one figure, in percent of the measured value.

    Attributes:
        over: `each` if every run must keep the bound, or `median` if the median of the runs' absolute errors must keep
            it
        runs: names of the runs that the target is about; empty for every scored run
    """

    figure: str
    within_pct: float = Field(ge=0)
    column: Column = "blind"
    over: Literal["each", "median"] = "each"
    runs: tuple[str, ...] = ()


class Anchor(Settings):
    """The run that the *anchored* column is fitted to, and the figure that is reproduced by each parameter.

    Attributes:
        decode: factor on the time of decode steps
        prefill: factor on the time that prompts add to a step
        overhead: milliseconds outside the engine (HTTP, tokeniser, client) that are added to each request
    """

    run: str
    decode: str | None = None
    prefill: str | None = None
    overhead: str | None = None


class Case(Settings):
    """One measured run, or several of one deployment. See docs/external-cases.md for an example."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    title: str
    source: str = Field(description="publisher of the measurement, with its licence")
    engine: str = Field(description="name of the engine, with its version if known")
    gpu: str = Field(description="name in the catalogue of GPUs")
    client: str = Field(
        "",
        description="client that sent the requests and measured, as the publisher names it; empty: none",
    )
    site: str = Field(
        "",
        description="where and by whom it was measured: the time that a client and a network add is learnt for one "
        "client at one site; default: the case's name",
    )
    deployment: dict[str, Any] = Field(
        description="the deployment; the number of KV blocks is estimated if it is not given"
    )
    replicas: int = Field(1, ge=1, le=1000, description="number of engines with this deployment, behind one router")
    router: str = Field("round-robin", description="name of the router")
    measured: dict[str, Any] = Field(description="`format`, and the fields that the format needs")
    shown: tuple[str, ...] = Field(description="figures in the report, in order")
    targets: tuple[Target, ...] = ()
    anchor: Anchor | None = None
    notes: str = ""
    only_named: bool = Field(
        False, description="score the case only if --case names it, because it takes long to simulate"
    )
    only_left_out: bool = Field(
        False, description="score the case only with --case or --leave-out, because it has many runs"
    )

    @property
    def is_of_steps(self) -> bool:
        """True if the measurement is a log of iterations and not of requests; see `external.steps`."""
        return self.measured.get("format") == "iteration-log"

    @property
    def format(self) -> MeasuredFormat:
        return measured_format(self.measured, f"{self.name}.measured")

    def deployment_of(self, run: MeasuredRun) -> tuple[Deployment, bool]:
        """Return the deployment of a run, and True if its number of KV blocks is stated (else it has to be estimated).

        Settings in the measurement override the case file. The engine is that of the run, or else that of the case.
        """
        engine = EngineName.read(run.engine or self.engine)
        stated = merged({"device": "cuda", **self.deployment, "engine": str(engine)}, dict(run.settings))
        deployment = parse(Deployment, stated, where=f"{self.name}.deployment")
        return deployment, deployment.scheduler.states("num_blocks")


def origin_of(case: Case, run: MeasuredRun, deployment: Deployment) -> Origin:
    """Return the origin of a run; raise UserError for an unknown GPU or model.

    All iteration logs of one model on one GPU are one source, even if they are in several cases.
    """
    known = find_gpu(run.gpu or case.gpu)
    measured_as = case.measured["format"] if case.is_of_steps else case.name
    source = f"{measured_as}/{deployment.model}/{known.name}/{deployment.engine_name.name}"
    client = run.client or case.client
    at_site = f"{client} at {case.site or case.name}" if client else ""
    return Origin.from_deployment(find_model(deployment.model), known, deployment, source, at_site)


def case_of_recordings(
    folders: Sequence[Path],
    deployment: Deployment | None,
    gpu: str,
    replicas: int,
    router: str,
    within_pct: float | None,
) -> Case:
    """Return the case of runs of one server that `tokentwin bench --url` recorded.

    The default `deployment` is the one in the first recording. `within_pct` is the bound on the error of every mean and
    rate. Raises UserError if the deployment is unknown or has a fleet.
    """
    first = Recording.load(folders[0])
    said = json.loads(first.run["deployment"] or "{}") if deployment is None else deployment.as_stated()
    if not said:
        remedy = "is missing; say what the server runs, as its deployment file does"
        raise UserError("deployment", None, remedy)
    if said.pop("fleet", None) is not None:
        raise UserError("deployment", "fleet", "is not taken here; give --replicas and --router")
    about = json.loads(first.run["hardware"] or "{}")
    targets = [Target(figure=f, within_pct=within_pct) for f in _MEANS_AND_RATES] if within_pct is not None else []
    return Case(
        name="own-server",
        title=f"Your server at {about.get('url', 'an unknown address')}",
        source="recorded by tokentwin bench",
        engine=said.pop("engine", None)
        or f"{EngineName.read(said.get('policy', ''))} {about.get('server') or ''}".strip(),
        gpu=gpu,
        deployment=said,
        replicas=replicas,
        router=router,
        measured={"format": "recording", "folders": [str(folder.absolute()) for folder in folders]},
        shown=_SHOWN,
        targets=tuple(targets),
        notes=_CLIENTS_TIMES,
    )


def load_case(path: Path) -> Case:
    """Read a case file; raise UserError with the file and the field if it is invalid."""
    case = parse(Case, read_yaml(path, "case"), where=path.name)
    if not case.is_of_steps:
        _ = case.format  # raises UserError for unknown formats and fields before anything runs
    return case


def load_cases(folder: Path, refused: dict[str, UserError] | None = None) -> list[Case]:
    """Return the case files of `folder`, in the order of their file names.

    If `refused` is given, the error of an invalid file is stored there under the file's name, and the other files are
    read. Otherwise an invalid file raises UserError. A folder without case files always does.
    """
    paths = sorted(folder.glob("*.yaml"))
    if not paths:
        raise UserError("cases", str(folder), "has no case files (*.yaml)")
    cases: dict[str, Case] = {}
    for path in paths:
        try:
            case = load_case(path)
            if case.name in cases:
                raise UserError(f"{path.name}.name", case.name, "is the name of another case too; choose another name")
            cases[case.name] = case
        except UserError as error:
            if refused is None:
                raise
            refused[path.name] = error
    return list(cases.values())
