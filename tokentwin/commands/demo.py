"""`tokentwin demo`: the whole loop on this machine, in a few minutes."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tokentwin.finite import Finite

if TYPE_CHECKING:
    from realengine.replay import Replayed
    from serving.workload import Workload

DEMO_TRACE = {
    "name": "demo",
    "seed": 1,
    "arrivals": {"kind": "gamma", "rate": 2.2, "cv": 1.3},
    "prompt": {"kind": "lognormal", "mean": 70, "sigma": 0.7, "max": 400},
    "output": {"kind": "lognormal", "mean": 22, "sigma": 0.6, "max": 96},
    "system_prompts": {"count": 2, "tokens": {"kind": "fixed", "tokens": 48}},
}
DEMO_SCHEDULER = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "max_model_len": 1024,
    "num_blocks": 300,
}


@click.command()
@click.option("--out", "-o", default="runs/demo", show_default=True, type=click.Path(), help="Directory to write to.")
@click.option("--model", help="Model folder or random:FAMILY, instead of SmolLM2.")
@click.option("--requests", default=60, show_default=True, type=click.IntRange(min=10), help="Requests in the trace.")
@click.option("--seconds", default=45.0, show_default=True, type=Finite(min=5), help="Seconds to calibrate for.")
@click.option("--repeats", default=2, show_default=True, type=click.IntRange(min=2), help="Real runs of the trace.")
@click.option(
    "--patience",
    default=120.0,
    show_default=True,
    type=Finite(min=0),
    help="Most seconds to spend on waiting for a quiet machine and on repeating disturbed runs.",
)
def demo(out: str, model: str | None, requests: int, seconds: float, repeats: int, patience: float) -> None:
    """Record traffic on the real engine, calibrate, simulate the same traffic, and report the error.

    Calibration traces and real runs take turns, so that both see the same state of the machine. A fixed reference
    step, the canary, shows when something else is using the machine: the demo then waits. It repeats runs that were
    disturbed nevertheless, and the report says so. An earlier demo in the same directory is replaced.
    """
    from calibration.validation.covalidation import covalidate
    from planning.measure.calibration_runs import fit_recordings, measure
    from planning.measure.calm_recordings import CalmRecordings
    from planning.measure.load_engine import load_engine
    from planning.measure.whole_run import record_whole
    from serving.deployments.config import Deployment, parse
    from serving.document import print_document
    from serving.errors import UserError
    from tokentwin.commands.calibrate import print_calibration
    from tokentwin.commands.validate import DECISIONS_DIFFER
    from traces.synth import parse_spec, synthesise
    from traces.writer import write_workload

    directory = Path(out)
    model = model or _model()
    deployment = parse(Deployment, {"model": model, "scheduler": DEMO_SCHEDULER}, where="demo")
    workload = synthesise(parse_spec({**DEMO_TRACE, "requests": requests}, where="demo"))
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError("out", out, f"cannot be made: {error.strerror}; choose another directory") from None
    engine = load_engine(deployment, partial(click.echo, err=True))
    write_workload(workload, directory / "trace.parquet", "parquet", overwrite=True)
    click.echo(f"engine: {model}, {deployment.dtype}, {deployment.threads} CPU thread; {requests} requests")

    from realengine.replay import canary  # not before the engine is loaded, which says what torch's threads do

    def record(offered: Workload, path: Path) -> Replayed:
        return record_whole(offered, engine, path, overwrite=True)

    calm = CalmRecordings(record, lambda: canary(engine), patience, click.echo)
    real: list[Path] = []
    measured: list[Path] = []

    def real_run() -> None:
        target = directory / f"real-{len(real) + 1}"
        done = calm.record(workload, target)
        click.echo(f"real run {len(real) + 1}: {done.finished} requests in {done.duration_ns / 1e9:.1f} s")
        real.append(target)

    for path in measure(engine, directory / "calibration", seconds, calm.record):
        click.echo(f"measured {path.name}")
        measured.append(path)
        if len(real) < repeats:
            real_run()
    while len(real) < repeats:
        real_run()
    calm.repeat_disturbed()
    calibration = fit_recordings(measured, directory / "calibration")
    print_calibration(calibration)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    report = covalidate(real, calibration, directory / "validation", created, calm.set_aside())
    print_document(report)
    click.echo(f"\nLook at it: tokentwin dashboard {directory}")
    if report.rungs.replay is not None and not report.rungs.replay.exact:
        raise SystemExit(DECISIONS_DIFFER)


def _model() -> str:
    """SmolLM2 if it can be had; otherwise random weights of the same shape, and say so."""
    from planning.home import home
    from realengine.smollm2 import fetch
    from serving.errors import UserError

    try:
        fetch(home())
    except UserError as error:
        click.echo(f"{error}\nusing random weights of SmolLM2's shape instead: times are alike, text is not")
        return "random:smollm2"
    return "smollm2"
