"""`tokentwin conformance`: our schedulers against recordings of vLLM's and SGLang's own."""

from __future__ import annotations

import click


@click.command()
@click.argument("recordings", nargs=-1, required=True, type=click.Path())
@click.option("--policy", help="Policy, by name or as path/to/file.py:Class; by default that of the recorded engine.")
def conformance(recordings: tuple[str, ...], policy: str | None) -> None:
    """Replay RECORDINGS of vLLM's or SGLang's scheduler with our own, and compare every decision.

    The command prints one line for each recording. The exit status is 1 if any decision differs.
    """
    from sim.checks.conformance import conform

    different = 0
    for recording in recordings:
        result = conform(recording, policy)
        click.echo(str(result))
        different += not result.identical
    if different:
        raise SystemExit(1)
