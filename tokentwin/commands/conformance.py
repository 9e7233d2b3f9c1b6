"""`tokentwin conformance`: hold our scheduler against recordings of vLLM's own."""

from __future__ import annotations

import click


@click.command()
@click.argument("recordings", nargs=-1, required=True, type=click.Path())
@click.option("--policy", default="vllm", show_default=True, help="A policy's name, or path/to/file.py:Class.")
def conformance(recordings: tuple[str, ...], policy: str) -> None:
    """Replay oracle RECORDINGs through our scheduler on the virtual clock.

    Prints one line for each; exits 1 on any difference.
    """
    from sim.conformance import conform

    different = 0
    for recording in recordings:
        result = conform(recording, policy)
        click.echo(str(result))
        different += not result.identical
    if different:
        raise SystemExit(1)
