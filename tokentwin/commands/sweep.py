"""`tokentwin sweep`: many simulated runs, one row each in a Parquet dataset."""

from __future__ import annotations

import sys
from pathlib import Path

import click

_LINES = 6  # largest number of lines about defaults


@click.command()
@click.argument("file", type=click.Path())
@click.option("--out", "-o", required=True, type=click.Path(path_type=Path), help="Directory to write the dataset to.")
@click.option("--resume", is_flag=True, help="Continue the sweep in --out: simulate only the runs that it lacks.")
@click.option("--retry-failed", is_flag=True, help="With --resume: also simulate the failed runs again.")
@click.option("--executor", type=click.Choice(["process", "ray"]), default="process")
@click.option(
    "--jobs", "-j", type=click.IntRange(min=1), help="Number of runs at the same time; by default one for each CPU."
)
@click.option("--dry-run", is_flag=True, help="Only print how many runs FILE describes, and about how long they take.")
def sweep(
    file: str, out: Path, resume: bool, retry_failed: bool, executor: str, jobs: int | None, dry_run: bool
) -> None:
    """Simulate every run that FILE describes.

    OUT/runs is a hive-partitioned Parquet dataset with one row for each run. If a run fails, its row contains the
    error, and the exit status is 1.
    """
    from tokentwin.planning.sweep.settings import load_sweep
    from tokentwin.serving.errors import UserError

    if retry_failed and not resume:
        raise UserError("retry-failed", None, "needs --resume, which continues the sweep in --out; give both")
    settings = load_sweep(file)
    if dry_run:
        from tokentwin.planning.sweep.estimate import sweep_estimate

        click.echo(sweep_estimate(settings, jobs))
        return
    from tokentwin.planning.progress import telling
    from tokentwin.planning.sweep.executors import find_executor
    from tokentwin.planning.sweep.sweep import Sweep

    prepared = Sweep.from_settings(settings)
    for line in (*prepared.seen_by, *prepared.defaults[:_LINES]):
        click.echo(line)
    if len(prepared.defaults) > _LINES:
        click.echo(
            f"... and {len(prepared.defaults) - _LINES} more lines; the column config has the settings of every run"
        )
    with telling() as tell:
        made_by = find_executor(executor, jobs, prepared.settings.run_limit_s)
        done = prepared.run(out, made_by, resume=resume, retry_failed=retry_failed, tell=tell)
    click.echo(f"{done.made} runs made, {done.kept} kept, {done.failed} failed; the dataset is {out / 'runs'}")
    if done.failed:
        click.echo(f"{done.failed} runs failed; the first error: {done.first_error}", err=True)
        sys.exit(1)
