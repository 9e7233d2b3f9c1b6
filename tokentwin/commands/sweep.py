"""`tokentwin sweep`: many simulated runs, one row each in a Parquet dataset."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command()
@click.argument("file", type=click.Path())
@click.option("--out", "-o", required=True, type=click.Path(path_type=Path), help="Directory of the dataset.")
@click.option("--resume", is_flag=True, help="Go on with the sweep in OUT: only runs that it lacks are made.")
@click.option("--retry-failed", is_flag=True, help="With --resume, make the failed runs again, too.")
@click.option("--executor", type=click.Choice(["process", "ray"]), default="process", show_default=True)
@click.option("--jobs", "-j", type=click.IntRange(min=1), help="Runs at once; by default one for each CPU.")
@click.option("--dry-run", is_flag=True, help="Only say how many runs FILE asks for.")
def sweep(
    file: str, out: Path, resume: bool, retry_failed: bool, executor: str, jobs: int | None, dry_run: bool
) -> None:
    """Simulate every run that FILE asks for.

    OUT/runs is a hive-partitioned Parquet dataset with one row a run. A run that fails is a row with its error; the
    exit status is then 1.
    """
    from tokentwin.sweeps.executors import find_executor
    from tokentwin.sweeps.settings import load_sweep
    from tokentwin.sweeps.sweep import Sweep

    planned = Sweep.of(load_sweep(file))
    if dry_run:
        click.echo(f"{len(planned.points)} runs")
        return
    done = planned.run(out, find_executor(executor, jobs), resume=resume, retry_failed=retry_failed)
    click.echo(f"{done.made} runs made, {done.kept} kept, {done.failed} failed; {out / 'runs'}")
    if done.failed:
        click.echo(f"{done.failed} failed, the first: {done.first_error}", err=True)
        sys.exit(1)
