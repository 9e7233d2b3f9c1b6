"""`tokentwin validate`: hold the simulator against real runs, rung by rung."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tokentwin.commands.validate_external import external
from tokentwin.finite import Finite

if TYPE_CHECKING:
    from calibration.steps.step_cost import Calibration

DECISIONS_DIFFER = 1
ERROR_TOO_LARGE = 3


class _Rungs(click.Group):
    """Anything that is no subcommand is about recordings: `validate REAL...` is `validate runs REAL...`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["runs", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_Rungs)
def validate() -> None:
    """Hold the simulator against real runs, rung by rung.

    `validate REAL... -c CALIBRATION -o OUT` is short for `validate runs ...`: rungs 1 to 3, on recordings of our own
    engine. `validate external` is rung 4, on published measurements of others.
    """


validate.add_command(external)


@validate.command()
@click.argument("real", nargs=-1, type=click.Path())
@click.option("--calibration", "-c", required=True, type=click.Path(), help="Directory made by `tokentwin calibrate`.")
@click.option("--out", "-o", required=True, type=click.Path(), help="Directory of the report.")
@click.option("--trace", type=click.Path(), help="Record this trace on the engine now, in place of REAL.")
@click.option("--repeats", default=2, show_default=True, type=click.IntRange(min=1), help="Real runs of --trace.")
@click.option("--limit", type=click.IntRange(min=1), help="Only the first N requests of --trace.")
@click.option("--rate-scale", type=Finite(min=0, min_open=True), help="Multiply the rate of --trace.")
@click.option("--max-error", type=Finite(min=0), help="Exit 3 if any run error exceeds this many percent.")
@click.option("--format", "style", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.option("--force", is_flag=True, help="Replace existing recordings in --out.")
def runs(
    real: tuple[str, ...],
    calibration: str,
    out: str,
    trace: str | None,
    repeats: int,
    limit: int | None,
    rate_scale: float | None,
    max_error: float | None,
    style: str,
    force: bool,
) -> None:
    """Compare the simulator with REAL recordings of one workload (repeats give the noise floor).

    Rung 1: every decision of the real run, replayed, must come out identical; exit 1 otherwise. Rung 2: step
    times. Rung 3: TTFT, TPOT, E2E and throughput of the run. Writes report.json, step_residuals.parquet and the
    simulated run.
    """
    from calibration.steps.step_cost import Calibration
    from calibration.validation.covalidation import covalidate
    from serving.document import print_document
    from serving.errors import UserError

    measured = Calibration.load(calibration)
    if bool(real) == bool(trace):
        raise UserError("REAL", list(real), "give recordings, or --trace to record them now, not both")
    if not trace and (limit or rate_scale):
        raise UserError("limit/rate-scale", limit or rate_scale, "goes with --trace")
    paths = list(real) or _record(trace or "", measured, Path(out), repeats, limit, rate_scale, force)
    report = covalidate(paths, measured, out, datetime.now(UTC).isoformat(timespec="seconds"))
    if style == "json":
        click.echo(report.dumps())
    else:
        print_document(report)
    if report.rungs.replay is not None and not report.rungs.replay.exact:
        raise SystemExit(DECISIONS_DIFFER)
    if max_error is not None and report.worst_error_pct() > max_error:
        click.echo(f"largest run error {report.worst_error_pct():.1f} % exceeds --max-error {max_error:g} %", err=True)
        raise SystemExit(ERROR_TOO_LARGE)


def _record(
    trace: str, measured: Calibration, out: Path, repeats: int, limit: int | None, rate_scale: float | None, force: bool
) -> list[str]:
    from planning.measure.load_engine import load_engine
    from planning.measure.whole_run import record_whole
    from serving.deployments.config import Deployment, parse
    from traces.reader import read_workload
    from traces.reshape import reshaped

    workload = reshaped(read_workload(trace), limit=limit, rate_scale=rate_scale)
    engine = load_engine(parse(Deployment, json.loads(measured.deployment), where="calibration.deployment"))
    paths = []
    for number in range(1, repeats + 1):
        click.echo(f"real run {number} of {repeats}", err=True)
        record_whole(workload, engine, out / f"real-{number}", overwrite=force)
        paths.append(str(out / f"real-{number}"))
    return paths
