"""`tokentwin gpus`: the catalogue of GPUs."""

from __future__ import annotations

import click


@click.command()
def gpus() -> None:
    """GPUs known by name: dense TFLOP/s, links in one direction, and prices as dated defaults."""
    from serving.gpu_spec import gpus as catalogue

    click.echo(f"{'':13}{'GiB':>7}{'TB/s':>6}  TFLOP/s: 16-bit{'fp8':>7}{'fp4':>7}{'link GB/s':>11}{'$/h':>7}  as of")
    for gpu in catalogue().values():
        rates = (gpu.bf16_flop_per_s, gpu.fp8_flop_per_s, gpu.fp4_flop_per_s)
        shown = ["-" if rate is None else f"{rate / 1e12:,.0f}" for rate in rates]
        memory = f"{gpu.memory_bytes / 1024**3:7.1f}{gpu.memory_bytes_per_s / 1e12:6.2f}"
        price = f"{gpu.usd_per_hour:7.2f}  {gpu.price_as_of}"
        click.echo(
            f"{gpu.name:13}{memory}{shown[0]:>17}{shown[1]:>7}{shown[2]:>7}{gpu.link_bytes_per_s / 1e9:11,.0f}{price}"
        )
    click.echo("Sources, and how to describe one of your own: docs/models-and-gpus.md")
