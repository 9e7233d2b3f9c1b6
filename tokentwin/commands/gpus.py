"""`tokentwin gpus`: the catalogue of GPUs."""

from __future__ import annotations

import click


@click.command()
def gpus() -> None:
    """List the known GPUs: memory, dense TFLOP/s, link speed in one direction, and default prices with their dates."""
    from serving.deployments.gpu_spec import gpus as catalogue

    click.echo(f"{'':13}{'memory':>12}{'TFLOP/s of dense GEMMs':>25}{'link':>6}")
    click.echo(f"{'':13}{'GiB':>6}{'TB/s':>6}{'16-bit':>9}{'fp8':>8}{'fp4':>8}{'GB/s':>6}{'$/h':>7}  as of")
    for gpu in catalogue().values():
        rates = (gpu.bf16_flop_per_s, gpu.fp8_flop_per_s, gpu.fp4_flop_per_s)
        shown = ["-" if rate is None else f"{rate / 1e12:,.0f}" for rate in rates]
        memory = f"{gpu.memory_bytes / 1024**3:6.1f}{gpu.memory_bytes_per_s / 1e12:6.2f}"
        price = f"{gpu.usd_per_hour:7.2f}  {gpu.price_as_of}"
        click.echo(
            f"{gpu.name:13}{memory}{shown[0]:>9}{shown[1]:>8}{shown[2]:>8}{gpu.link_bytes_per_s / 1e9:6,.0f}{price}"
        )
    click.echo("Sources, and how to describe your own GPU: docs/models-and-gpus.md")
