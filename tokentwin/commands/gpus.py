"""`tokentwin gpus`: the catalogue of GPUs."""

from __future__ import annotations

import click


@click.command()
def gpus() -> None:
    """List the known GPUs: memory, dense TFLOP/s, link (GB/s in one direction, GPUs), power, price with its date."""
    from tokentwin.calibration.kernels.surfaces import bundled_names
    from tokentwin.serving.deployments.gpu_spec import gpus as catalogue

    measured = bundled_names()
    heads = f"{'16-bit':>7}{'fp8':>7}{'fp4':>7}{'GB/s':>6}{'GPUs':>5}{'W':>6}{'$/h':>7}  as of"
    click.echo(f"{'':14}{'memory':>12}{'TFLOP/s of dense GEMMs':>23}{'link':>9}")
    click.echo(f"{'':14}{'GiB':>6}{'TB/s':>6}{heads}")
    for gpu in catalogue().values():
        rates = (gpu.bf16_flop_per_s, gpu.fp8_flop_per_s, gpu.fp4_flop_per_s)
        shown = ["-" if rate is None else f"{rate / 1e12:,.0f}" for rate in rates]
        memory = f"{gpu.memory_bytes / 1024**3:6.1f}{gpu.memory_bytes_per_s / 1e12:6.2f}"
        linked = str(gpu.linked_gpus or 1) if gpu.link_bytes_per_s > gpu.pcie_bytes_per_s else "PCIe"
        link = f"{gpu.link_bytes_per_s / 1e9:6,.0f}{linked:>5}"
        price = f"{gpu.power_w or 0:6,.0f}{gpu.usd_per_hour:7.2f}  {str(gpu.price_as_of)[:7]}"
        name = gpu.name if gpu.name in measured else f"{gpu.name}*"
        click.echo(f"{name:14}{memory}{shown[0]:>7}{shown[1]:>7}{shown[2]:>7}{link}{price}")
    click.echo("* no kernel was measured on it: step times are extrapolated, with wide bands")
    click.echo("Sources, and how to describe your own GPU: docs/models-and-gpus.md")
