"""`tokentwin conformance`: hold our scheduler against recordings of vLLM's own."""

from __future__ import annotations

import click


@click.command()
@click.argument("recordings", nargs=-1, required=True, type=click.Path())
@click.option("--policy", default="vllm", help="Policy, by name or as path/to/file.py:Class.")
def conformance(recordings: tuple[str, ...], policy: str) -> None:
    """Replay RECORDINGS of vLLM's scheduler through ours, and compare every decision.

    Prints one line for each recording. The exit status is 1 if any decision differs.
    """
    from sim.conformance import conform

    different = 0
    for recording in recordings:
        result = conform(recording, policy)
        click.echo(str(result))
        different += not result.identical
    if different:
        raise SystemExit(1)
