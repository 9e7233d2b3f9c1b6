"""`tokentwin conformance`: our schedulers against recordings of vLLM's and SGLang's own."""

from __future__ import annotations

import click

from tokentwin.serving.errors import UserError


@click.command()
@click.argument("recordings", nargs=-1, required=True, type=click.Path())
@click.option("--policy", help="Policy, by name or as path/to/file.py:Class; by default that of the recorded engine.")
def conformance(recordings: tuple[str, ...], policy: str | None) -> None:
    """Replay RECORDINGS of vLLM's or SGLang's scheduler with our own, and compare every decision.

    The command prints one line for each feature (the first word of a recording's name), a total, and every difference.
    The exit status is 1 if any decision differs, otherwise 2 if a file is no such recording.
    """
    from tokentwin.sim.checks.conformance import by_feature, conform, lines

    results, refused = [], 0
    for recording in recordings:
        try:
            results.append(conform(recording, policy))
        except UserError as error:
            click.echo(f"tokentwin: {error}", err=True)
            refused += 1
    for line in lines(by_feature(results)):
        click.echo(line)
    if not all(result.identical for result in results):
        raise SystemExit(1)
    if refused:
        raise SystemExit(2)
