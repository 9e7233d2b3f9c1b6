"""`tokentwin calibrate`: measure the engine and fit the step cost model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tokentwin.deployments import deployment_options, read_deployment
from tokentwin.finite import Finite


@click.command()
@click.option("--out", "-o", required=True, type=click.Path(), help="Directory of the calibration.")
@click.option("--seconds", default=60.0, show_default=True, type=Finite(min=1), help="Time to measure.")
@click.option(
    "--from-recordings", "recordings", multiple=True, type=click.Path(), help="Fit these instead of measuring."
)
@click.option("--force", is_flag=True, help="Replace an existing calibration.")
@deployment_options
def calibrate(
    out: str,
    seconds: float,
    recordings: tuple[str, ...],
    force: bool,
    deployment_file: str | None,
    **flags: Any,
) -> None:
    """Run the engine over a designed set of short traces and fit what a step costs.

    Writes calibration.json (prices, domain, held-out residuals, hardware, noise), steps.parquet and the recordings.
    """
    from serving.errors import UserError
    from tokentwin.calibrating import fit_recordings, measure

    directory = Path(out)
    if (directory / "calibration.json").exists() and not force:
        raise UserError("out", out, "holds a calibration already; choose another directory or add --force")
    if recordings:
        from calibration.decision_replay import recorded_deployment
        from traces.recording import Recording

        simulated = [path for path in recordings if Recording.load(path).run["clock"] != "wall"]
        if simulated:
            raise UserError("from-recordings", simulated[0], "was simulated; give recordings of the real engine")
        engines = {recorded_deployment(Recording.load(path)).timing().model_dump_json() for path in recordings}
        if len(engines) > 1:
            raise UserError("from-recordings", len(engines), "engines among the recordings; give those of one")
        paths = [Path(path) for path in recordings]
    else:
        from tokentwin.engines import load_engine

        engine = load_engine(read_deployment(deployment_file, flags))
        paths = []
        for path in measure(engine, directory, seconds, overwrite=force):
            click.echo(f"measured {path.name}", err=True)
            paths.append(path)
    print_calibration(fit_recordings(paths, directory))
    click.echo(f"saved in {out}")


def print_calibration(calibration: Any) -> None:
    """Prices and held-out errors."""
    from rich.console import Console
    from rich.table import Table

    from calibration.step_features import CPU_FEATURES, STEP_FEATURES

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
