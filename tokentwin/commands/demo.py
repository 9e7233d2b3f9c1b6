"""`tokentwin demo`: the whole loop on this machine, in a few minutes."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from tokentwin.options import Finite
from tokentwin.planning.deployments import ENGINES
from tokentwin.serving.answers.figures import shown_share

if TYPE_CHECKING:
    from tokentwin.realengine.offered_workload import Replayed
    from tokentwin.serving.workload import Workload

DEMO_SCHEDULER = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 1024, "num_blocks": 300}
VLLM_ON_CPU = {"block_size": 32, "num_blocks": 150}  # the same memory in larger blocks, which its attention needs


@click.command()
@click.option("--out", "-o", default="runs/demo", type=click.Path(), help="Directory to write to.")
@click.option("--engine", type=click.Choice(ENGINES), default=ENGINES[0], help="Real engine: ours, or vLLM.")
@click.option("--model", help="Model folder or random:FAMILY, instead of SmolLM2.")
@click.option("--minutes", default=3.0, type=Finite(min=0.1), help="Approximate duration of the demo.")
@click.option("--repeats", default=2, type=click.IntRange(min=2), help="Number of real runs of the same trace.")
def demo(out: str, engine: str, model: str | None, minutes: float, repeats: int) -> None:
    """Calibrate, record traffic on the real engine, simulate the same traffic, and report the simulator's errors.

    The demo first measures this machine, and chooses as much traffic as the machine can serve in --minutes.
    Calibration traces and real runs take turns, so that both see the same speed of the machine. The demo replaces an
    earlier demo in the same directory.

    With --engine vllm the real engine is vLLM itself, in a separate Python environment (`make vllm`).
    """
    began = perf_counter()

    from tokentwin.calibration.validation.covalidation import covalidate
    from tokentwin.commands.validate import DECISIONS_DIFFER
    from tokentwin.planning.measure.calibrator import fit_recordings, measure
    from tokentwin.planning.measure.demo_size import LOAD, demo_size
    from tokentwin.planning.measure.real_engine import load_engines, pace_of, record_whole
    from tokentwin.serving.answers.terminal import print_report
    from tokentwin.serving.deployments.config import Deployment, parse
    from tokentwin.serving.errors import UserError
    from tokentwin.traces.formats.trace_file import write_workload
    from tokentwin.traces.synth import parse_spec, synthesise

    directory = Path(out)
    model = model or _model()
    stated: dict[str, Any] = {"model": model, "scheduler": DEMO_SCHEDULER}
    if engine == "vllm":
        stated |= {"engine": "vllm", "scheduler": {**DEMO_SCHEDULER, **VLLM_ON_CPU}}
    deployment = parse(Deployment, stated, where="demo")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError("out", out, f"cannot be made: {error.strerror}; choose another directory") from None
    real_engine = load_engines(deployment, partial(click.echo, err=True))
    pace, rows = pace_of(real_engine), DEMO_SCHEDULER["max_num_seqs"] // 2
    size = demo_size(pace, rows, 60 * minutes - (perf_counter() - began), repeats)
    workload = synthesise(parse_spec(size.trace(), where="demo"))
    write_workload(workload, directory / "trace.parquet", "parquet", overwrite=True)
    click.echo(
        f"{model} in {real_engine.deployment.dtype} on one thread: {pace.decode_step_ns / 1e6:.0f} ms for a step of "
        f"{rows} decodes, {pace.prompt_token_ns / 1e6:.1f} ms for a prompt token.\n"
        f"So {size.requests} requests at {size.rate:g} a second, {shown_share(LOAD)} of what it can do: {repeats} real "
        f"runs of about {size.run_s:.0f} s, and {size.calibration_s:.0f} s of calibration."
    )

    def record(offered: Workload, path: Path) -> Replayed:
        return record_whole(offered, real_engine, path, overwrite=True)

    real: list[Path] = []
    measured: list[Path] = []

    def real_run() -> None:
        target = directory / f"real-{len(real) + 1}"
        done = record(workload, target)
        click.echo(f"real run {len(real) + 1}: {done.finished} requests in {done.duration_ns / 1e9:.1f} s")
        real.append(target)

    for path in measure(real_engine, directory / "calibration", size.calibration_s, record):
        click.echo(f"measured {path.name}")
        measured.append(path)
        if len(real) < repeats:
            real_run()
    while len(real) < repeats:
        real_run()
    calibration = fit_recordings(measured, directory / "calibration")
    created = datetime.now(UTC).isoformat(timespec="seconds")
    report = covalidate(real, calibration, directory / "validation", created)
    print_report(report.report())
    calibrated = f"--trace {directory}/trace.parquet -c {directory}/calibration"
    click.echo(f"\nLook at it:    tokentwin dashboard {directory}")
    click.echo(f"Try a change:  tokentwin compare {calibrated} --b max_num_batched_tokens=64")
    if engine == ENGINES[0]:
        click.echo("Ask vLLM:      make vllm && tokentwin demo --engine vllm -o runs/vllm   (4 GB once; docs/vllm.md)")
    if report.rungs.replay is not None and not report.rungs.replay.exact:
        raise SystemExit(DECISIONS_DIFFER)


def _model() -> str:
    """Return SmolLM2 if it can be fetched; otherwise random weights of the same shape, with a notice."""
    from tokentwin.planning.home import home
    from tokentwin.realengine.models.smollm2 import fetch
    from tokentwin.serving.errors import UserError

    try:
        fetch(home())
    except UserError as error:
        click.echo(
            f"{error}\nusing random weights of SmolLM2's shape instead; times are the same, but the text is meaningless"
        )
        return "random:smollm2"
    return "smollm2"
