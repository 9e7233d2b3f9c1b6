"""`tokentwin gpus`: the catalogue of GPUs."""

from __future__ import annotations

import click


@click.command()
def gpus() -> None:
    """List the known GPUs: memory, dense TFLOP/s, link (GB/s in one direction, GPUs), power, price with its date."""
    from calibration.kernels.surfaces import bundled_names
    from serving.deployments.gpu_spec import gpus as catalogue

    measured = bundled_names()
    heads = f"{'16-bit':>9}{'fp8':>8}{'fp4':>8}{'GB/s':>6}{'GPUs':>6}{'W':>6}{'$/h':>7}  as of"
    click.echo(f"{'':15}{'memory':>12}{'TFLOP/s of dense GEMMs':>25}{'link':>12}")
    click.echo(f"{'':15}{'GiB':>6}{'TB/s':>6}{heads}")
    for gpu in catalogue().values():
        rates = (gpu.bf16_flop_per_s, gpu.fp8_flop_per_s, gpu.fp4_flop_per_s)
        shown = ["-" if rate is None else f"{rate / 1e12:,.0f}" for rate in rates]
        memory = f"{gpu.memory_bytes / 1024**3:6.1f}{gpu.memory_bytes_per_s / 1e12:6.2f}"
        linked = f"{gpu.linked_gpus or 1:,}" if gpu.link_bytes_per_s > gpu.pcie_bytes_per_s else "PCIe"
        link = f"{gpu.link_bytes_per_s / 1e9:6,.0f}{linked:>6}"
        price = f"{gpu.power_w or 0:6,.0f}{gpu.usd_per_hour:7.2f}  {gpu.price_as_of}"
        name = gpu.name if gpu.name in measured else f"{gpu.name} *"
        click.echo(f"{name:15}{memory}{shown[0]:>9}{shown[1]:>8}{shown[2]:>8}{link}{price}")
    click.echo("* no kernel was measured on it: its step times are extrapolated, with wide intervals")
    click.echo("Sources, and how to describe your own GPU: docs/models-and-gpus.md")
