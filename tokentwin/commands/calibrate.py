"""`tokentwin calibrate`: measure the engine and fit the step cost model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from planning.deployments import read_deployment
from tokentwin.deployment_options import deployment_options
from tokentwin.finite import Finite

if TYPE_CHECKING:
    from calibration.steps.step_cost import Calibration
    from serving.deployments.config import Deployment
    from serving.workload import Workload


@click.command()
@click.option("--out", "-o", required=True, type=click.Path(), help="Directory of the calibration.")
@click.option("--seconds", default=60.0, show_default=True, type=Finite(min=1), help="Time to measure.")
@click.option(
    "--from-recordings", "recordings", multiple=True, type=click.Path(), help="Fit these instead of measuring."
)
@click.option(
    "--from-iterations", "iterations", type=click.Path(), help="Learn an engine from a log of its iterations (CSV)."
)
@click.option("--from-case", "case", type=click.Path(), help="Learn an engine from the anchor run of a case file.")
@click.option("--data", default=".", show_default=True, type=click.Path(), help="Folder of the files a case names.")
@click.option("--gpu", help="With --from-iterations: the GPU that the engine ran on.")
@click.option("--force", is_flag=True, help="Replace an existing calibration.")
@deployment_options
def calibrate(
    out: str,
    seconds: float,
    recordings: tuple[str, ...],
    iterations: str | None,
    case: str | None,
    data: str,
    gpu: str | None,
    force: bool,
    deployment_file: str | None,
    **flags: Any,
) -> None:
    """Run the engine over a designed set of short traces and fit what a step costs.

    Writes calibration.json (prices, domain, held-out residuals, hardware, noise), steps.parquet and the recordings.
    With --from-iterations and --from-case nothing is run: what was measured of another engine corrects the kernel
    tables of its GPU, and engine.json is written, which simulate takes as well.
    """
    from planning.measure.calibration_runs import fit_recordings
    from serving.errors import UserError

    directory = Path(out)
    if bool(iterations) != bool(gpu):
        raise UserError("gpu", gpu, "goes with --from-iterations, which needs it")
    sources = [name for name in (iterations, case, *recordings[:1]) if name]
    if len(sources) > 1:
        raise UserError("from", ", ".join(sources), "give one of --from-recordings, --from-iterations and --from-case")
    _check_free(directory, "calibration.json", force)
    if iterations and gpu:
        _from_iterations(iterations, gpu, read_deployment(deployment_file, flags), directory, force)
    elif case:
        _from_case(Path(case), Path(data), directory, force)
    else:
        if recordings:
            paths = _of_one_engine(recordings)
        else:
            paths = _measured(read_deployment(deployment_file, flags), directory, seconds, force)
        print_calibration(fit_recordings(paths, directory))
    click.echo(f"saved in {out}")


def _of_one_engine(recordings: tuple[str, ...]) -> list[Path]:
    """Where they lie. Raises UserError for one that was simulated, and for those of several engines."""
    from calibration.validation.decision_replay import recorded_deployment
    from serving.errors import UserError
    from traces.recording import Recording

    engines = set()
    for path in recordings:
        recording = Recording.load(path)
        if recording.run["clock"] != "wall":
            raise UserError("from-recordings", path, "was simulated; give recordings of the real engine")
        engines.add(recorded_deployment(recording).timing().model_dump_json())
    if len(engines) > 1:
        raise UserError("from-recordings", len(engines), "engines among the recordings; give those of one")
    return [Path(path) for path in recordings]


def _measured(deployment: Deployment, directory: Path, seconds: float, force: bool) -> list[Path]:
    """Recordings of the designed traces, made now."""
    from planning.measure.calibration_runs import measure
    from planning.measure.load_engine import load_engine
    from planning.measure.whole_run import record_whole

    engine = load_engine(deployment)

    def record(workload: Workload, path: Path) -> None:
        record_whole(workload, engine, path, overwrite=force)

    paths = []
    for path in measure(engine, directory, seconds, record):
        click.echo(f"measured {path.name}", err=True)
        paths.append(path)
    return paths


def _from_iterations(path: str, gpu: str, deployment: Deployment, directory: Path, force: bool) -> None:
    from datetime import UTC, datetime

    from rich.console import Console
    from rich.table import Table

    from calibration.steps.external_calibration import FILE
    from calibration.steps.iteration_fit import calibrate_from_log
    from calibration.steps.iteration_log import read_iteration_log
    from calibration.steps.predict import kernels
    from serving.deployments.model_catalogue import find_model

    _check_free(directory, FILE, force)
    log = read_iteration_log(path)
    learnt = calibrate_from_log(
        log,
        gpu,
        find_model(deployment.model),
        deployment,
        kernels(gpu),
        source=f"{len(log)} iterations of {Path(path).name}",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    learnt.save(directory)
    factors = Table("part", "factor", title=f"correction {learnt.id}", title_justify="left")
    for name, factor in learnt.correction.factors.items():
        factors.add_row(name, f"{factor:.3f}")
    added = Table("added for", "µs", title_justify="left")
    for name, ns in learnt.correction.added_ns.items():
        added.add_row(name, f"{ns / 1e3:,.1f}")
    errors = Table(
        "regime",
        "steps",
        "median error",
        "p95 error",
        "bias",
        title="the middle third, from the others",
        title_justify="left",
    )
    for name, e in learnt.residuals.items():
        errors.add_row(
            name, f"{e['steps']:.0f}", f"{e['median_pct']:.2f} %", f"{e['p95_pct']:.2f} %", f"{e['bias_pct']:+.2f} %"
        )
    console = Console()
    for table in (factors, added, errors):
        console.print(table)
    console.print(str(learnt.step_interval))


def _from_case(path: Path, data: Path, directory: Path, force: bool) -> None:
    from datetime import UTC, datetime

    from calibration.steps.external_calibration import FILE
    from calibration.validation.external.blind import blind
    from calibration.validation.external.case import load_case
    from calibration.validation.external.learning import learnt_from
    from calibration.validation.external.scoring import score
    from tokentwin.commands.validate_external import print_outcomes

    _check_free(directory, FILE, force)
    outcome = score(load_case(path), data, blind)
    learnt = learnt_from(outcome, datetime.now(UTC).isoformat(timespec="seconds"))
    learnt.save(directory)
    print_outcomes([outcome])


def _check_free(directory: Path, file: str, force: bool) -> None:
    from serving.errors import UserError

    if (directory / file).exists() and not force:
        raise UserError("out", str(directory), "holds a calibration already; choose another directory or add --force")


def print_calibration(calibration: Calibration) -> None:
    """Prices and held-out errors."""
    from rich.console import Console
    from rich.table import Table

    from calibration.steps.features import CPU_FEATURES, STEP_FEATURES

    prices = Table("part", "what it pays for", "µs each", title=f"calibration {calibration.id}")
    for name, meaning in STEP_FEATURES.items():
        prices.add_row(f"step: {name}", meaning, f"{calibration.step_prices_ps[name] / 1e6:,.3f}")
    for name, meaning in CPU_FEATURES.items():
        prices.add_row(f"cpu: {name}", meaning, f"{calibration.cpu_prices_ps[name] / 1e6:,.3f}")
    errors = Table("regime", "held-out steps", "median error", "p95 error", "bias")
    for name, r in calibration.residuals.items():
        errors.add_row(
            name, str(r.steps), f"{r.median_error_pct:.1f} %", f"{r.p95_error_pct:.1f} %", f"{r.bias_pct:+.1f} %"
        )
    console = Console()
    console.print(prices)
    console.print(errors)
