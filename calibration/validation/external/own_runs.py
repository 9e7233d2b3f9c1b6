"""A calibration from any number of runs that users measured on their own servers.

A measured file is a result of `vllm bench serve`, a report of GuideLLM, an artifact folder of AIPerf, a recording of
`tokentwin bench --url`, a CSV table, or a case file, which states everything itself. Each run's prediction is
linearised, and the run joins the evidence from published runs as one more source (Gauss-Newton).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

from tokentwin.calibration.steps.evidence import Evidence, Origin, Taught, bundled_evidence, own_origin
from tokentwin.calibration.steps.external_calibration import correction_of
from tokentwin.calibration.steps.interval import factors_of
from tokentwin.calibration.steps.measured_runs import MeasuredRuns, OwnFigure
from tokentwin.calibration.validation.external.case import Case, load_case
from tokentwin.calibration.validation.external.predicted_run import PredictedRun, predicted_run, taught
from tokentwin.serving.data_file import read_json_file
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.engines import EngineName
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.errors import UserError
from tokentwin.traces.recording import Recording

_ROUNDS = 4
_MOST_LEFT_OUT = 12  # maximum number of groups in which runs are left out in turn
_FORMATS = "a result of vllm bench serve, GuideLLM or AIPerf, a recording, a CSV table, or a case file"


def learnt_from_runs(
    paths: Sequence[Path], deployment: Deployment | None, gpu: str | None, created: str
) -> MeasuredRuns:
    """Return the calibration from the runs in `paths`.

    `deployment` and `gpu` apply to files that do not state theirs. Raises UserError with the reason for a file that
    cannot be used.
    """
    runs: list[PredictedRun] = []
    for path in paths:
        case, folder = _case(path, deployment, gpu)
        for run in case.format.read(folder):
            if not (run.gpu or case.gpu):
                remedy = f"is missing; state it in {path.name}, or give exactly one --gpu"
                raise UserError("gpu", None, remedy)
            predicted = predicted_run(case, run)
            if not predicted.figures:
                raise UserError("measured", str(path), "has neither a mean TTFT nor a mean TPOT; add one of them")
            runs.append(replace(predicted, origin=own_origin(predicted.origin)))
    if not runs:
        raise UserError("measured", None, "is empty; give at least one measured run")
    first = runs[0]
    fitted = _equations(bundled_evidence(), runs)
    return MeasuredRuns(
        gpu=find_gpu(first.gpu).name,
        deployment=first.case.deployment_of(first.measured_run)[0].model_dump_json(exclude_unset=True),
        taught=tuple(part.as_dict() for part in fitted),
        figures=tuple(_figures(runs)),
        source=f"{len(runs)} measured runs from {', '.join(path.name for path in paths)}",
        created=created,
    )


def _case(path: Path, deployment: Deployment | None, gpu: str | None) -> tuple[Case, Path]:
    """Return the case of a measured file, and the folder that its files are relative to."""
    if path.suffix in (".yaml", ".yml"):
        return load_case(path), path.parent
    measured, client = _format(path)
    stated = deployment.as_stated() if deployment is not None else {}
    if not stated and measured["format"] == "recording":
        stated = json.loads(Recording.load(path).run["deployment"] or "{}")
    if not stated:
        raise UserError("deployment", None, f"is missing; {path.name} does not say what the server ran")
    pools = (stated.pop("fleet", None) or {}).get("pools", [{}])
    if sum(pool.get("replicas", 1) for pool in pools) != 1:
        raise UserError("deployment", "fleet", "must be left out; measured runs are of one engine")
    engine = stated.pop("engine", None) or str(EngineName.read(stated.get("policy", "")))
    return Case(
        name="own-runs",
        title=f"your runs in {path.name}",
        source="measured by the user",
        engine=engine,
        gpu=gpu or "",
        client=client,
        deployment=stated,
        measured=measured,
        shown=("ttft_ms.mean", "tpot_ms.mean"),
    ), path.parent


def _format(path: Path) -> tuple[dict[str, Any], str]:
    """Return the format of a file or folder as a case file states it, and the client that writes this format."""
    if not path.exists():
        raise UserError("measured", str(path), "does not exist; give the path of a measured run")
    if path.is_dir():
        if (path / "profile_export.jsonl").exists():
            return {"format": "aiperf", "folder": path.name}, "AIPerf"
        return {"format": "recording", "folders": (path.name,)}, "tokentwin bench"
    if path.suffix == ".csv":
        return {"format": "csv", "file": path.name}, ""
    if path.suffix == ".json":
        keys = read_json_file(path, "measured", f"; give {_FORMATS}")
        if not isinstance(keys, dict):
            keys = {}
        if "benchmarks" in keys:
            return {"format": "guidellm", "file": path.name}, "GuideLLM"
        if "mean_ttft_ms" in keys or "ttfts" in keys:
            return {"format": "bench-serve", "files": (path.name,)}, "vllm bench serve"
    raise UserError("measured", str(path), f"has no known format; give {_FORMATS}")


def _equations(evidence: Evidence, runs: Sequence[PredictedRun]) -> list[Taught]:
    """Return the normal equations of each origin, linearised where `evidence` with these runs predicts them."""
    by_origin: dict[Origin, list[PredictedRun]] = {}
    for run in runs:
        by_origin.setdefault(run.origin, []).append(run)
    equations: list[Taught] = []
    for _ in range(_ROUNDS):
        known = evidence.joined(equations)
        equations = [taught(origin, own, known.belief(origin).logs) for origin, own in by_origin.items()]
    return equations


def _figures(runs: Sequence[PredictedRun]) -> Iterator[OwnFigure]:
    """Yield each figure with its blind prediction, and with its prediction from the other runs."""
    blind, groups = bundled_evidence(), min(len(runs), _MOST_LEFT_OUT)
    others = [
        blind.joined(_equations(blind, [run for at, run in enumerate(runs) if at % groups != group]))
        for group in range(groups)
    ]
    for at, run in enumerate(runs):
        before, after = _bands(blind, run), _bands(others[at % groups], run)
        for name, measured, guess, band in zip(run.figures, run.measured.tolist(), before, after, strict=True):
            yield OwnFigure(
                run=run.measured_run.name,
                figure=name,
                measured=measured,
                blind=guess.centre,
                low=band.low,
                high=band.high,
                others=band.centre if groups > 1 else None,
            )


class _Band(NamedTuple):
    """A prediction in milliseconds and the ends of its 90 % interval."""

    low: float
    centre: float
    high: float


def _bands(evidence: Evidence, run: PredictedRun) -> list[_Band]:
    """Return the prediction of each figure."""
    belief = evidence.belief(run.origin)
    correction = correction_of(evidence, run.origin, belief, run.deployment, find_gpu(run.gpu))
    centres, slopes = run.predicted(belief.logs, correction)
    bands = []
    for name, centre, slope in zip(run.figures, centres.tolist(), slopes, strict=True):
        sigma = sqrt(float(belief.variance(slope)) + evidence.noise[name] ** 2)
        low, high = factors_of(evidence.reach(name, run.origin) * sigma)
        bands.append(_Band(centre * low, centre, centre * high))
    return bands
