"""The command: `python -m lab.oracles .venv-vllm --scenarios 100`."""

from __future__ import annotations

import click

from lab.oracles.live_conformance import conform_live
from lab.oracles.live_engines import find_engine
from tokentwin.cli import main
from tokentwin.sim.checks.conformance import lines


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("engine")
@click.option("--policy", help="Policy, by name or as path/to/file.py:Class; by default that of the engine.")
@click.option("--python", help="Python interpreter that runs an unpacked wheel.")
@click.option("--scenarios", default=20, type=click.IntRange(1, 100_000),
              help="Number of scenarios of each kind (priorities, drafts, ...).")  # fmt: skip
@click.option("--seed", default=0, help="Seed of the first scenario; the others count up.")
def oracles(engine: str, policy: str | None, python: str | None, scenarios: int, seed: int) -> None:
    """Let the scheduler of ENGINE and our own decide random scenarios, and compare every decision.

    ENGINE is a vLLM or SGLang: a virtual environment that has it, the folder of an unpacked wheel, or an installed
    release. The command prints one line for each kind of scenario, a total, and every difference. The exit status is 1
    if any decision differs.
    """
    outcome = conform_live(find_engine(engine, python), scenarios, seed, policy)
    click.echo(f"{outcome.engine.title} {outcome.version}")
    for line in lines(outcome.families):
        click.echo(line)
    raise SystemExit(any(family.identical < len(family.decided) for family in outcome.families))


if __name__ == "__main__":
    main(oracles)
