"""Deployment options that several verbs share: a YAML file, and flags that override it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from serving.config import Deployment

_SCHEDULER_FLAGS = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "num_blocks")
_FLAGS: dict[str, type] = {
    "model": str,
    "device": str,
    "dtype": str,
    "threads": int,
    "attention": str,
    "quantization": str,
    "kv_cache_dtype": str,
    "tensor_parallel_size": int,
    "pipeline_parallel_size": int,
    "gpu_memory_utilization": float,
    "policy": str,
}

Command = TypeVar("Command", bound=Callable[..., Any])


def deployment_options(command: Command) -> Command:
    """Add --deployment and the flags that override single fields of it."""
    overlap = click.option(
        "--async-scheduling/--no-async-scheduling", default=None, help="Override scheduler.async_scheduling."
    )
    command = overlap(command)
    for name in reversed(_SCHEDULER_FLAGS):
        command = click.option(f"--{name.replace('_', '-')}", type=int, help=f"Override scheduler.{name}.")(command)
    for name, kind in reversed(_FLAGS.items()):
        command = click.option(f"--{name.replace('_', '-')}", type=kind, help=f"Override {name}.")(command)
    return click.option("--deployment", "-d", "deployment_file", type=click.Path(), help="A deployment, in YAML.")(
        command
    )


def read_deployment(
    deployment_file: str | None, flags: dict[str, Any], otherwise: Deployment | None = None
) -> Deployment:
    """The deployment in the file (else `otherwise`, else the default), with every flag that was given in its place."""
    from serving.config import Deployment, load_deployment, parse

    base = load_deployment(deployment_file) if deployment_file else otherwise or Deployment()
    data = base.model_dump()
    data.update({name: flags[name] for name in _FLAGS if flags.get(name) is not None})
    scheduler = (*_SCHEDULER_FLAGS, "async_scheduling")
    data["scheduler"].update({name: flags[name] for name in scheduler if flags.get(name) is not None})
    return parse(Deployment, data, where=deployment_file or "deployment")
