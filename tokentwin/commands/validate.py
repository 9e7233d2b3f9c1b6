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
    from calibration.covalidation import Covalidation
    from calibration.step_cost import Calibration

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
@click.option("--trace", type=click.Path(), help="Record this trace on the engine first, instead of giving REAL.")
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
    from calibration.covalidation import covalidate
    from calibration.step_cost import Calibration
    from serving.errors import UserError

    measured = Calibration.load(calibration)
    if bool(real) == bool(trace):
        raise UserError("REAL", list(real), "give recordings, or --trace to record them now, not both")
    if not trace and (limit or rate_scale):
        raise UserError("limit/rate-scale", limit or rate_scale, "goes with --trace")
    paths = list(real) or _record(trace or "", measured, Path(out), repeats, limit, rate_scale, force)
    report = covalidate(paths, measured, out, datetime.now(UTC).isoformat(timespec="seconds"))
    if style == "json":
        click.echo(json.dumps(report.as_dict()))
    else:
        print_report(report)
    if not report.replay.exact:
        raise SystemExit(DECISIONS_DIFFER)
    if max_error is not None and report.worst_error_pct() > max_error:
        click.echo(f"largest run error {report.worst_error_pct():.1f} % exceeds --max-error {max_error:g} %", err=True)
        raise SystemExit(ERROR_TOO_LARGE)


def _record(
    trace: str, measured: Calibration, out: Path, repeats: int, limit: int | None, rate_scale: float | None, force: bool
) -> list[str]:
    from serving.config import Deployment, parse
    from tokentwin.engines import load_engine
    from tokentwin.whole_run import record_whole
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


def print_report(report: Covalidation) -> None:
    """The ladder as tables, the verdict last."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console()
    replay = report.replay
    console.print(
        f"rung 1, decisions: steps {replay.identical}/{replay.steps}, requests "
        f"{replay.identical_requests}/{replay.requests} identical"
    )
    if replay.first_difference:
        console.print(f"  first difference: {replay.first_difference}", highlight=False)
    steps = Table(
        "regime", "steps", "median error", "p95 error", "bias", title="rung 2, step time", title_justify="left"
    )
    for name, r in report.regimes.items():
        steps.add_row(
            name, str(r.steps), f"{r.median_error_pct:.1f} %", f"{r.p95_error_pct:.1f} %", f"{r.bias_pct:+.1f} %"
        )
    console.print(steps)
    each = replay.requests // len(report.recordings["real"])
    console.print(f"\n[italic]rung 3, the run of {each} requests[/]", highlight=False)
    run = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    run.add_column("metric", no_wrap=True)
    run.add_column("stat", no_wrap=True)
    for heading in ("real", "simulated", "error %", "floor %"):
        run.add_column(heading, justify="right", no_wrap=True)
    run.add_column("90 % band", justify="right")
    for row in report.rows:
        floor = "-" if row.floor_pct is None else f"{row.floor_pct:.1f}"
        band = f"{_shown(row.low)}–{_shown(row.high)}"
        run.add_row(
            row.metric,
            row.stat,
            _shown(row.real),
            _shown(row.simulated),
            f"{row.error_pct:+.1f}",
            floor,
            band if row.covered else f"[yellow]{band}[/]",
        )
    console.print(run)
    console.print()
    console.print(f"rung 5, bands: {100 * report.covered:.0f} % of the real numbers lie in their 90 % band")
    if report.extrapolated_share:
        console.print(f"extrapolated: {100 * report.extrapolated_share:.1f} % of the simulated steps were not measured")
    if report.set_aside:
        console.print(report.set_aside, highlight=False)
    if report.disturbed:
        console.print(f"[bold yellow]DISTURBED[/]: {report.disturbance}; take these errors with care")
    elif report.disturbance:
        console.print(f"undisturbed: {report.disturbance}")
    console.print(f"[bold]{report.verdict}[/]", soft_wrap=True)


def _shown(value: float) -> str:
    """At most two digits after the point, and none from 1,000 on."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2f}"
