"""`tokentwin validate`: the simulator compared with real runs, rung by rung."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from tokentwin.commands.validate_external import external
from tokentwin.commands.validate_front_door import front_door
from tokentwin.options import Finite, options_of, requested
from tokentwin.planning.measure.request import ValidateRequest
from tokentwin.saved_answer import AnswerOutput
from tokentwin.serving.answers.figures import shown_percent

DECISIONS_DIFFER = 1
ERROR_TOO_LARGE = 3

options = options_of(ValidateRequest)


class _Rungs(click.Group):
    """A group whose default subcommand is `runs`: `validate REAL...` is `validate runs REAL...`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["runs", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_Rungs)
def validate() -> None:
    """Compare the simulator with real runs, on seven levels (rungs).

    `validate REAL... -c CALIBRATION -o OUT` is short for `validate runs ...`. It compares decisions, step times and
    latencies with recordings of our own engine (rungs 1 to 3). `validate external` compares with published
    measurements of other engines, or with your own server (rung 4). `validate front-door` compares with latencies
    that clients of `tokentwin serve` saw (rung 6). Rung 5 checks the 90 % bands of rungs 3 and 4. Rung 7, choices
    among measured configurations, is `python -m lab.decisions` in a checkout of the repository.
    """


validate.add_command(external)
validate.add_command(front_door)


@validate.command()
@click.argument("real", nargs=-1, type=click.Path())
@options("--calibration --out --trace=traffic --repeats --minutes --limit --rate-scale --window-s")
@click.option("--max-error", type=Finite(min=0), help="Exit with status 3 if an error exceeds this many percent.")
@click.option("--format", "style", type=click.Choice(["table", "json"]), default="table")
@click.option("--force", is_flag=True, help="Replace existing recordings in --out.")
def runs(max_error: float | None, style: str, force: bool, **given: Any) -> None:
    """Compare the simulator with REAL recordings of one workload. Repeated recordings give the noise floor.

    Rung 1 replays every scheduling decision of the real run; the exit status is 1 if any differs. Rung 2 compares step
    times. Rung 3 compares TTFT, TPOT, E2E and throughput of the complete run. The command writes report.json,
    step_residuals.parquet and the simulated run.
    """
    from tokentwin.planning.measure import validator

    report = validator.validate(requested(ValidateRequest, given), overwrite=force, say=partial(click.echo, err=True))
    AnswerOutput(style).finish(report)
    if report.rungs.replay is not None and not report.rungs.replay.exact:
        raise SystemExit(DECISIONS_DIFFER)
    if max_error is not None and report.worst_error_pct() > max_error:
        click.echo(
            f"the largest run error, {shown_percent(report.worst_error_pct())}, exceeds --max-error {max_error:g} %",
            err=True,
        )
        raise SystemExit(ERROR_TOO_LARGE)
