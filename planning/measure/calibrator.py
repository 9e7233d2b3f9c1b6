"""Calibrations on request: the engine is measured now, or earlier measurements are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from tokentwin.calibration.acceptance import as_accepted
from tokentwin.calibration.front_door_fit import fit_front_door
from tokentwin.calibration.kv_link import as_linked
from tokentwin.calibration.steps.design import designed_workloads
from tokentwin.calibration.steps.external_calibration import LEARNT_FILES, ExternalCalibration, kernels
from tokentwin.calibration.steps.features import MeasuredSteps
from tokentwin.calibration.steps.fit import fit, predict, step_residuals_table
from tokentwin.calibration.steps.iteration_fit import calibrate_from_log, read_iteration_log
from tokentwin.calibration.steps.launches import measured_launches
from tokentwin.calibration.steps.measured_runs import MeasuredRuns
from tokentwin.calibration.steps.step_cost import Calibration
from tokentwin.calibration.steps.surface_fit import SurfaceFeatures, surfaces_for
from tokentwin.calibration.validation.decision_replay import recorded_deployment
from tokentwin.calibration.validation.external.case import load_case
from tokentwin.calibration.validation.external.learning import learnt_from
from tokentwin.calibration.validation.external.own_runs import learnt_from_runs
from tokentwin.calibration.validation.external.predictor import blind
from tokentwin.calibration.validation.external.scoring import CaseResult, score
from tokentwin.planning.checkout import lab_is_here
from tokentwin.planning.measure.real_engine import calibrated_adapters, load_engines, pace_of, record_whole
from tokentwin.planning.measure.request import CalibrateRequest
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.model_catalogue import find_model, pooling_model
from tokentwin.serving.errors import UserError
from tokentwin.serving.front_door import FILE as FRONT_DOOR
from tokentwin.serving.front_door import FrontDoor
from tokentwin.serving.version import __version__
from tokentwin.serving.workload import Workload
from tokentwin.traces.measured.recorded_client import client_recording
from tokentwin.traces.recording import Recording, notes_of

if TYPE_CHECKING:
    from tokentwin.planning.measure.real_engine import RealEngines


class Made(NamedTuple):
    """A calibration of our own engine, of other engines (with the result of a case), or of a front door."""

    calibration: Calibration | ExternalCalibration | MeasuredRuns | FrontDoor
    outcome: CaseResult | None = None


def calibrate(
    request: CalibrateRequest, *, overwrite: bool = False, say: Callable[[str], None] = lambda line: None
) -> Made:
    """Fit the step times of an engine, or a front door, and save the calibration in the request's directory.

    `say` is called with a line for each measured trace. Raises UserError for measurements that allow no fit, for an
    engine that cannot run here, and if there is a calibration already and `overwrite` is not set.
    """
    if not overwrite and any((request.out / file).exists() for file in ("calibration.json", *LEARNT_FILES, FRONT_DOOR)):
        remedy = (
            "already holds a calibration; use --force (overwrite in Python) to replace it, or choose another directory"
        )
        raise UserError("out", str(request.out), remedy)
    if request.iterations is not None:
        return Made(_from_iterations(request, request.iterations))
    if request.measured:
        return Made(_from_measured(request))
    if request.case is not None:
        return _from_case(request, request.case)
    if request.served is not None and request.client is not None:
        return Made(_from_served(request, request.served, request.client))
    if request.recordings:
        return Made(fit_recordings(_of_one_engine(request.recordings), request.out, request.kernels))
    paths, logits = _measured(request, overwrite, say)
    return Made(fit_recordings(paths, request.out, request.kernels, logits))


def _of_one_engine(paths: tuple[Path, ...]) -> list[Path]:
    """Return `paths` if they are recordings of one engine. Raises UserError for simulated runs and several engines.

    On a GPU, recordings with and without CUDA graphs count as recordings of one engine.
    """
    engines = set()
    for path in paths:
        recording = Recording.load(path)
        if recording.run["clock"] != "wall":
            raise UserError("recordings", str(path), "was simulated; give recordings of the real engine")
        engine = recorded_deployment(recording).timing()
        engines.add((engine if engine.device == "cpu" else _with_graphs(engine)).model_dump_json())
    if len(engines) > 1:
        raise UserError("recordings", len(engines), "different engines made these recordings; give those of one engine")
    return list(paths)


def _measured(
    request: CalibrateRequest, overwrite: bool, say: Callable[[str], None]
) -> tuple[list[Path], tuple[int, int] | None]:
    """Record the designed traces now; return the paths, and the times of penalties and scored tokens in ps."""
    with closing(load_engines(request.deployment or Deployment(), say)) as engine:

        def record(workload: Workload, path: Path) -> None:
            record_whole(workload, engine, path, overwrite)
            say(f"measured {path.name}")

        say(f"calibrating for about {request.minutes:g} min")
        logits = _logit_times(engine)
        return list(measure(engine, request.out, 60 * request.minutes, record)), logits


def _logit_times(engine: RealEngines) -> tuple[int, int] | None:
    """Measure the times of penalties and scored prompts; None for several devices, and for vLLM."""
    from tokentwin.realengine.engine import Engine
    from tokentwin.realengine.logit_times import logit_times
    from tokentwin.realengine.runner import ModelRunner

    if isinstance(engine, Engine) and isinstance(engine.runner, ModelRunner):
        return logit_times(engine.runner)
    return None


def _from_iterations(request: CalibrateRequest, path: Path) -> ExternalCalibration:
    gpu, deployment, log = request.gpu or "", request.deployment or Deployment(), read_iteration_log(path)
    learnt = calibrate_from_log(
        log,
        gpu,
        find_model(deployment.model),
        deployment,
        kernels(gpu),
        source=f"{len(log)} iterations of {path.name}",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    learnt.save(request.out)
    return learnt


def _from_served(request: CalibrateRequest, served: Path, client: Path) -> FrontDoor:
    engine = None if request.engine is None else Calibration.load(request.engine)
    server = Recording.load(served)
    if server.run["clock"] != "wall" and "served" not in notes_of(server.run):  # a twin's server is real
        raise UserError("served", str(served), "was simulated; give the recording of `tokentwin serve -o`")
    learnt = fit_front_door(server, client_recording(client), engine)
    learnt.save(request.out)
    return learnt


def _from_measured(request: CalibrateRequest) -> MeasuredRuns:
    created = datetime.now(UTC).isoformat(timespec="seconds")
    learnt = learnt_from_runs(request.measured, request.deployment, request.gpu, created)
    learnt.save(request.out)
    return learnt


def _from_case(request: CalibrateRequest, path: Path) -> Made:
    lab_is_here()  # whose formats the case may name
    outcome = score(load_case(path), request.data, blind)
    learnt = learnt_from(outcome, datetime.now(UTC).isoformat(timespec="seconds"))
    learnt.save(request.out)
    return Made(learnt, outcome)


def measure(
    engine: RealEngines, out: Path, seconds: float, record: Callable[[Workload, Path], object]
) -> Iterator[Path]:
    """Call `record` with one designed trace at each `next`, so that other runs can be made between traces.

    The recordings lie in `out`. The iterator yields the path of each.
    """
    adapters = calibrated_adapters(engine.deployment)
    pools = pooling_model(engine.deployment.model) is not None
    for workload in designed_workloads(engine.deployment.scheduler, pace_of(engine), seconds, adapters, pools):
        path = out / "runs" / workload.name
        record(workload, path)
        yield path


def _with_graphs(engine: Deployment) -> Deployment:
    return engine.model_copy(update={"enforce_eager": False})


def fit_recordings(
    paths: list[Path], out: Path, kernels: Path | None = None, logits: tuple[int, int] | None = None
) -> Calibration:
    """Fit a calibration to recordings of one deployment and save it in `out`.

    `kernels` is the table of the engine's own kernels, which the GPU suite writes. If some recordings are without CUDA
    graphs, the time of a kernel launch is fitted to these, and everything else to the others. `logits` are the times
    in ps of the penalties of a row and of a scored token, if they were measured.
    """
    recorded = [Recording.load(path) for path in paths]
    runs = [run for run in recorded if not recorded_deployment(run).enforce_eager] or recorded
    notes = [json.loads(run.run["notes"]) for run in runs]
    canaries = ("canary_before_ns", "canary_after_ns")  # the recording of a server has no canaries
    engine, hardware = recorded_deployment(runs[0]), json.loads(runs[0].run["hardware"])
    steps = MeasuredSteps([run.steps for run in runs], knees=engine.device == "cuda")
    surfaces, why_none = _surfaces(steps, engine, hardware.get("gpu", ""), kernels)
    calibration = fit(
        steps,
        surfaces=surfaces,
        why_none=why_none,
        deployment=as_linked(as_accepted(engine, runs), runs).model_dump_json(),
        hardware=hardware,
        version=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        noise={"canary_ns": [note[key] for note in notes for key in canaries if key in note]},
        launches=measured_launches(pa.concat_tables(run.steps for run in recorded), engine, hardware.get("gpu", "")),
    )
    if logits is not None:
        calibration = replace(calibration, changed_ps=logits[0], scored_ps=logits[1])
    calibration.save(out)
    pq.write_table(step_residuals_table(steps, predict(calibration, steps)), out / "steps.parquet")
    return calibration


def _surfaces(
    steps: MeasuredSteps, engine: Deployment, gpu: str, own: Path | None
) -> tuple[list[SurfaceFeatures], str]:
    """Return the kernel times that the steps may correct, or the reason why there are none.

    Raises UserError if the user gave kernels that cannot be used.
    """
    try:
        return surfaces_for(steps, engine, gpu, own), ""
    except UserError as error:
        if error.field == "kernels":
            raise
        reason = f"{error.value} {error.remedy}" if error.field == "surfaces" else str(error)
        if own is not None:
            raise UserError("kernels", str(own), f"cannot be used: {reason}") from None
        return [], reason
