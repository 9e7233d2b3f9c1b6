"""`tokentwin conformance`: our schedulers against vLLM's and SGLang's own, recorded or installed."""

from __future__ import annotations

import click

from tokentwin.serving.errors import UserError


@click.command()
@click.argument("recordings", nargs=-1, type=click.Path())
@click.option("--policy", help="Policy, by name or as path/to/file.py:Class; by default that of the recorded engine.")
@click.option("--live", metavar="ENGINE", help="Compare with this vLLM or SGLang on random scenarios: a release, a "
              "virtual environment that has it, or the folder of an unpacked wheel.")  # fmt: skip
@click.option("--python", help="With --live: Python interpreter that runs the engine.")
@click.option("--scenarios", default=20, show_default=True, type=click.IntRange(1, 100_000),
              help="With --live: number of scenarios of each kind (priorities, drafts, ...).")  # fmt: skip
@click.option(
    "--seed", default=0, show_default=True, help="With --live: seed of the first scenario; the others count up."
)
def conformance(
    recordings: tuple[str, ...], policy: str | None, live: str | None, python: str | None, scenarios: int, seed: int
) -> None:
    """Replay RECORDINGS of vLLM's or SGLang's scheduler with our own, and compare every decision.

    The command prints one line for each recording or, with --live, for each kind of scenario. The exit status is 1 if
    any decision differs.
    """
    if bool(recordings) == (live is not None):
        raise UserError("recordings", None, "must be given without --live, and left out with it")
    if live is not None:
        from tokentwin.sim.checks.live_conformance import conform_live, lines
        from tokentwin.sim.checks.live_engines import find_engine

        outcome = conform_live(find_engine(live, python), scenarios, seed, policy)
        click.echo("\n".join(lines(outcome)))
        raise SystemExit(0 if outcome.identical else 1)
    from tokentwin.sim.checks.conformance import conform

    different = 0
    for recording in recordings:
        result = conform(recording, policy)
        click.echo(str(result))
        different += not result.identical
    if different:
        raise SystemExit(1)
