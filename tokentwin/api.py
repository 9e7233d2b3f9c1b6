"""The Python API: one function for each command, with the same requests and answers as the command line.

Every answer has `.to_pandas()` and `.to_arrow()`, and can be shown on a terminal (`rich.print`) and in a notebook. A
wrong input raises a `tokentwin.serving.errors.UserError`, whose text is one line with field, value and remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from tokentwin.calibration.steps.external_calibration import ExternalCalibration
    from tokentwin.calibration.steps.measured_runs import MeasuredRuns
    from tokentwin.calibration.steps.step_cost import Calibration
    from tokentwin.calibration.validation.report import ValidationReport
    from tokentwin.planning.compare.document import ComparisonDocument
    from tokentwin.planning.diagnose.document import DiagnosisDocument
    from tokentwin.planning.plan.document import PlanDocument
    from tokentwin.planning.plan.most_clients import MostClientsDocument
    from tokentwin.planning.simulation import SimulatedRun
    from tokentwin.planning.sweep.results import SweepResults
    from tokentwin.serving.deployments.config import Deployment
    from tokentwin.serving.front_door import FrontDoor
    from tokentwin.serving.workload import Workload
    from tokentwin.traces.recording import Recording

    Traffic = str | Path | Mapping[str, Any] | Workload

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")

_OF_A_SIDE = ("deployment", "replicas", "router", "gpu", "calibration")


def _asked(function: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
    """Wrap an API function so that wrong arguments raise UserError.

    A call that a user's own file makes while it is being imported also raises UserError, because the file would run
    twice.
    """

    @wraps(function)
    def asked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
        from tokentwin.serving.errors import UserError, reason
        from tokentwin.serving.user_code.plugins import loading

        if file := loading():
            remedy = "simulates when it is imported; put what it runs below if __name__ == '__main__':"
            raise UserError("file", file, remedy)
        for name, value in kwargs.items():
            if value == "":
                raise UserError(name, "", "must not be empty; leave it out")
        try:
            return function(*args, **kwargs)
        except OSError as error:  # a full disk, a directory that may not be read, a name that is too long
            remedy = f"cannot be read or written: {reason(error)}"
            raise UserError("file", str(error.filename or ""), remedy) from error

    return asked


@_asked
def simulate(
    workload: Traffic,
    deployment: Deployment | Mapping[str, Any] | None = None,
    *,
    out: str | Path | None = None,
    band: bool = True,
    details: bool = True,
    overwrite: bool = False,
    **scenario: Any,
) -> SimulatedRun:
    """Simulate `deployment` on `workload` and record the run.

    Args:
        workload: the path of a trace, a `Workload`, or a specification as a mapping (see `tokentwin trace synth`). In
            its place, mean lengths and one of `rate`, `users` (with `think_s`) and `concurrency` make traffic up, such
            as `{"prompt": 1500, "output": 300, "users": 50}`
        deployment: deployment to simulate, by default one replica with vLLM's default settings; see `Deployment`
        out: directory to write the recording to; by default a temporary directory that stays after Python ends
        band: True to simulate both ends of the 90 % interval of step times, too
        details: True to record every step and the time of every token
        scenario: more fields of `tokentwin.planning.scenario.Scenario`: `gpu` or `calibration`, `replicas`, `router`,
            `prices` (dollars per GPU-hour by name), `slo` (bounds in ms by metric)

    Raises UserError for settings that cannot be simulated, and if `out` exists and `overwrite` is not set.
    """
    from tokentwin.planning.made_up import assumed
    from tokentwin.planning.scenario import Scenario
    from tokentwin.planning.simulation import recorded
    from tokentwin.serving.deployments.config import parse

    _check_flags(band=band, details=details, overwrite=overwrite)
    place = _directory(out, "run")
    with _offered(workload, "trace") as offered:
        requested = parse(Scenario, {"workload": offered, "deployment": deployment, **scenario}, where="simulate")
        run = recorded(requested.priced(), place, band=band, details=details, overwrite=overwrite)
        return replace(run, assumed=assumed(requested.synthetic))


@_asked
def plan(traffic: Traffic, slos: Sequence[str], *, jobs: int | None = None, **request: Any) -> PlanDocument:
    """Find the cheapest fleet that meets every SLO on `traffic`.

    Args:
        traffic: the traffic to plan for, in the forms of `workload` in `simulate`
        slos: SLOs such as `"ttft_ms p99<=500"` (ms) or `"attainment>=0.99"` (a share)
        jobs: number of simulations at a time; by default one for each CPU
        request: more fields of `tokentwin.planning.plan.request.PlanRequest`: `model`, `gpus`, `tensor_parallel_sizes`,
            `policies`, `vary`, `splits`, `mix`, `spot`, `prices`, `spares`, `rate_scale`, `window_s`, `router`, ...

    Raises UserError for requests that cannot be planned. If no fleet meets the SLOs, the answer's `feasible` is False.
    """
    from tokentwin.planning.plan.planner import plan
    from tokentwin.planning.plan.request import PlanRequest
    from tokentwin.serving.deployments.config import parse

    _check_jobs(jobs)
    with _offered(traffic) as offered:
        return plan(parse(PlanRequest, {"traffic": offered, "slos": slos, **request}, where="plan"), jobs=jobs)


@_asked
def most_users(
    traffic: Traffic, slos: Sequence[str], replicas: int, *, jobs: int | None = None, **request: Any
) -> MostClientsDocument:
    """Find the largest number of users that `replicas` replicas of each candidate bear within every SLO.

    Args:
        traffic: users who wait for answers: a specification with arrivals of kind `users` or `closed`, or mean lengths
            such as `{"prompt": 1500, "output": 300, "users": 50}`. Their number is the one that is tried first
        slos, jobs, request: as for `plan`

    Raises UserError for traffic that arrives at a rate, and for requests that cannot be planned.
    """
    from tokentwin.planning.plan.most_clients import most_clients
    from tokentwin.planning.plan.request import FleetRequest
    from tokentwin.serving.deployments.config import parse

    _check_jobs(jobs)
    with _offered(traffic) as offered:
        given = {"traffic": offered, "slos": slos, "replicas": replicas, **request}
        return most_clients(parse(FleetRequest, given, where="most_users"), jobs=jobs)


@_asked
def compare(
    a: Mapping[str, Any] | str | Path, b: Mapping[str, Any] | str | Path, traffic: Traffic | None = None, **request: Any
) -> ComparisonDocument:
    """Compare B with A, request by request, with confidence intervals.

    Args:
        a, b: settings in which the sides differ, by path (`{"policy": "fair"}`), or `deployment`, `replicas`,
            `router`, `gpu`, `calibration`. Without `traffic`: directories of recordings
        traffic: the requests that both sides serve, in the forms of `workload` in `simulate`
        request: more fields of `tokentwin.planning.compare.request.CompareRequest`. `gpu` or `calibration` times the
            steps of both sides. `model` and `tensor_parallel_size` hold for both sides, if `deployment` does not state
            them. Other fields are `seeds`, `bounds` (ms by metric), `threshold` (a share), ...

    Raises UserError for sides that cannot be simulated or paired.
    """
    from tokentwin.planning.compare import comparer
    from tokentwin.planning.compare.request import CompareRecordingsRequest, CompareRequest
    from tokentwin.planning.request import Timing
    from tokentwin.serving.deployments.config import parse
    from tokentwin.serving.errors import UserError

    if traffic is None:
        _path("a", a), _path("b", b)
        two = parse(CompareRecordingsRequest, {"a": a, "b": b, **request}, where="compare")
        return comparer.compare_recordings(two).called(str(a), str(b))
    if not isinstance(a, Mapping) or not isinstance(b, Mapping):
        raise UserError(
            "a/b",
            f"{a}, {b}",
            "must be mappings of settings if traffic is given; leave traffic out to compare recordings",
        )
    timing = {name: request.pop(name) for name in Timing.model_fields if name in request}
    with _offered(traffic) as offered:
        sides = {"a": _side(a), "b": _side(b), "traffic": offered, "timing": timing}
        names = (" ".join(f"{name}={value}" for name, value in side.items()) or "as it is" for side in (a, b))
        return comparer.compare(parse(CompareRequest, {**sides, **request}, where="compare")).called(*names)


@_asked
def sweep(
    settings: Mapping[str, Any] | str | Path,
    out: str | Path,
    *,
    executor: str = "process",
    jobs: int | None = None,
    resume: bool = False,
) -> SweepResults:
    """Simulate every run of `settings`, write the Parquet dataset `out`, and read it.

    Args:
        settings: the YAML file of a sweep, or its contents as a mapping
        executor: `process` or `ray`
        jobs: number of runs at a time; by default one for each CPU
        resume: True to continue the sweep in `out`

    Raises UserError if the settings describe no run, and if all runs failed. A run that fails is a row with its
    `error`.
    """
    from tokentwin.planning.sweep.executors import find_executor
    from tokentwin.planning.sweep.results import SweepResults
    from tokentwin.planning.sweep.settings import load_sweep, read_sweep
    from tokentwin.planning.sweep.sweep import Sweep
    from tokentwin.serving.errors import UserError

    _check_jobs(jobs)
    _check_flags(resume=resume)
    place = _path("out", out)
    read = read_sweep(settings) if isinstance(settings, Mapping) else load_sweep(_path("settings", settings))
    done = Sweep.from_settings(read).run(place, find_executor(executor, jobs, read.run_limit_s), resume=resume)
    if done.failed == done.made + done.kept:
        raise UserError("sweep", str(out), f"all {done.failed} runs failed; the first: {done.first_error}")
    return SweepResults.load(place)


@_asked
def diagnose(run: str | Path, **request: Any) -> DiagnosisDocument:
    """Find out why the recorded `run` is slow, and which changes would help.

    Args:
        request: fields of `tokentwin.planning.diagnose.request.DiagnoseRequest`. With `gpu` or `calibration` the run is
            simulated again with each constraint lifted. `metric` is the latency to explain. A latency above its bound
            in `bounds` (ms) counts as high

    Raises UserError if the run cannot be read or simulated.
    """
    from tokentwin.planning.diagnose.recorded_run import diagnose
    from tokentwin.planning.diagnose.request import DiagnoseRequest
    from tokentwin.serving.deployments.config import parse

    return diagnose(parse(DiagnoseRequest, {"run": str(run), **request}, where="diagnose"))


@_asked
def validate(
    real: Sequence[str | Path] = (),
    calibration: str | Path | None = None,
    out: str | Path | None = None,
    *,
    traffic: Traffic | None = None,
    overwrite: bool = False,
    **request: Any,
) -> ValidationReport:
    """Compare the simulator with recordings of the real engine: decisions, step times, and the whole run.

    Args:
        real: recordings of one workload; repeats show the noise between real runs
        calibration: directory that `calibrate` wrote
        out: directory to write the report to; by default a temporary directory that stays after Python ends
        traffic: traffic to record on the engine now, into `out`, instead of `real`; in the forms of `workload` in
            `simulate`
        request: more fields of `tokentwin.planning.measure.request.ValidateRequest`, about `traffic`: `repeats`,
            `limit`, `rate_scale`, `window_s` (seconds)

    Raises UserError if the recordings do not all have the same workload and the calibrated engine, and if `out` holds
    recordings and `overwrite` is not set.
    """
    from tokentwin.planning.measure.request import ValidateRequest
    from tokentwin.planning.measure.validator import validate
    from tokentwin.serving.deployments.config import parse

    _check_flags(overwrite=overwrite)
    with _offered(traffic) as offered:
        stated = {"real": real, "calibration": calibration, "traffic": offered, "out": _directory(out, "report")}
        given = {name: value for name, value in (stated | request).items() if value is not None}
        return validate(parse(ValidateRequest, given, where="validate"), overwrite=overwrite)


@_asked
def calibrate(
    deployment: Deployment | Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    **request: Any,
) -> Calibration | ExternalCalibration | MeasuredRuns | FrontDoor:
    """Measure the real engine on this machine, or read measurements of an engine, and fit its step times.

    Args:
        deployment: the deployment to measure, or the deployment that wrote the `iterations`
        out: directory of the calibration and the recordings; by default a temporary one, kept until Python ends
        request: more fields of `tokentwin.planning.measure.request.CalibrateRequest`: `minutes` to measure; or
            measurements to
            read: `recordings`, `iterations` or `measured` with `gpu`, `case` with `data`, or `served` with `client`

    Raises UserError if torch is not installed or the model cannot be loaded, for measurements to which nothing can be
    fitted, and if `out` holds a calibration and `overwrite` is not set.
    """
    from tokentwin.planning.measure.calibrator import calibrate
    from tokentwin.planning.measure.request import CalibrateRequest
    from tokentwin.serving.deployments.config import parse

    _check_flags(overwrite=overwrite)
    stated = {"deployment": deployment, "out": _directory(out, "calibration"), **request}
    return calibrate(parse(CalibrateRequest, stated, where="calibrate"), overwrite=overwrite).calibration


@_asked
def read_recording(path: str | Path) -> Recording:
    """Open the recording in the directory `path`; its `requests` and `steps` are Arrow tables.

    Raises UserError if it is missing or damaged.
    """
    from tokentwin.traces.recording import Recording

    return Recording.load(_path("path", path))


@contextmanager
def _offered(traffic: Traffic | None, as_field: str = "") -> Iterator[Any]:
    """Yield traffic in the form that a request takes: a specification unchanged, or the path of a trace.

    If `as_field` is given, yield a mapping from that field to the path. A mapping with mean lengths and one of
    `rate`, `users` and `concurrency` is made up to a specification.
    """
    from tokentwin.planning.made_up import made_up
    from tokentwin.serving.errors import UserError, reason
    from tokentwin.serving.workload import Workload

    if isinstance(traffic, Mapping) and {"rate", "users", "concurrency"} & traffic.keys():
        traffic = made_up(traffic).model_dump(mode="json")
    if traffic is None or isinstance(traffic, Mapping):
        yield traffic
        return
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix="tokentwin-") as folder:
        path = str(Path(folder) / "workload.parquet" if isinstance(traffic, Workload) else _path("traffic", traffic))
        if isinstance(traffic, Workload):
            from tokentwin.traces.formats.parquet import write_parquet

            try:
                write_parquet(traffic, Path(path))
            except (TypeError, ValueError, AttributeError, OverflowError) as error:
                remedy = f"has a request with a value of another kind: {reason(error)}"
                raise UserError("workload", traffic.name, remedy) from None
        yield {as_field: path} if as_field else path


def _directory(out: str | Path | None, name: str) -> Path:
    """Return `out`, or the path `name` in a new temporary directory."""
    from tempfile import mkdtemp

    return Path(mkdtemp(prefix="tokentwin-")) / name if out is None else _path("out", out)


def _path(field: str, value: object) -> Path:
    """Return `value` as a path. Raises UserError if it is not one."""
    from tokentwin.serving.deployments.config import check_text
    from tokentwin.serving.errors import UserError

    if not isinstance(value, str | Path) or not str(value):
        raise UserError(field, repr(value), "must be a path")
    check_text(str(value), field)
    return Path(value)


def _check_flags(**given: object) -> None:
    from tokentwin.serving.errors import UserError

    for name, value in given.items():
        if not isinstance(value, bool):
            raise UserError(name, repr(value), "must be True or False")


def _check_jobs(jobs: object) -> None:
    from tokentwin.serving.errors import UserError

    if jobs is not None and (isinstance(jobs, bool) or not isinstance(jobs, Integral) or jobs < 1):
        raise UserError(
            "jobs", repr(jobs), "must be a whole number of at least 1; leave it out to run one simulation on each CPU"
        )


def _side(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return one side of a comparison request, with settings of the deployment separated from settings of the run."""
    from tokentwin.serving.errors import UserError

    own = {name: changes[name] for name in _OF_A_SIDE if name in changes}
    for name, value in own.items():
        if value == "":
            raise UserError(name, "", "must not be empty; leave it out")
    return {**own, "settings": {name: value for name, value in changes.items() if name not in own}}
