"""Deployment options that several verbs share: a YAML file, and flags that override it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

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
_ATTENTION = ("auto", "torch", "triton", "hybrid")
_OF_THE_REAL_ENGINE = ("device", "threads", "attention")

Command = TypeVar("Command", bound=Callable[..., Any])


class _Setting(click.Option):
    """A flag whose help is its field's description, looked up only when help is asked for: imports take time."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        from serving.config import Deployment, SchedulerConfig

        field = (SchedulerConfig.model_fields | Deployment.model_fields)[self.name or ""]
        values = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        told = [field.description or "", *([" | ".join(values)] if values else [])]
        default = "" if field.default is None else f" [a deployment's default: {field.default}]"
        self.help = "; ".join(told) + default
        return super().get_help_record(ctx)


def deployment_options(command: Command) -> Command:
    """Add --deployment and the flags that override single fields of it."""
    command = click.option("--async-scheduling/--no-async-scheduling", default=None, cls=_Setting)(command)
    for name in reversed(_SCHEDULER_FLAGS):
        command = click.option(f"--{name.replace('_', '-')}", type=int, cls=_Setting)(command)
    for name, kind in reversed(_FLAGS.items()):
        command = click.option(f"--{name.replace('_', '-')}", type=kind, cls=_Setting)(command)
    return click.option("--deployment", "-d", "deployment_file", type=click.Path(), help="A deployment, in YAML.")(
        command
    )


def read_deployment(
    deployment_file: str | None, flags: dict[str, Any], otherwise: Deployment | None = None
) -> Deployment:
    """The deployment in the file (else `otherwise`, else the default), with every flag that was given in its place."""
    from serving.config import Deployment, parse
    from serving.errors import UserError

    base = completed(deployment_file, otherwise) if deployment_file else otherwise or Deployment()
    data = base.model_dump()
    if flags.get("num_blocks") is not None:
        if flags.get("gpu_memory_utilization") is not None:
            raise UserError("num_blocks", flags["num_blocks"], "or gpu_memory_utilization, not both")
        data["gpu_memory_utilization"] = None
    data.update({name: flags[name] for name in _FLAGS if flags.get(name) is not None})
    scheduler = (*_SCHEDULER_FLAGS, "async_scheduling")
    data["scheduler"].update({name: flags[name] for name in scheduler if flags.get(name) is not None})
    deployment = parse(Deployment, data, where=deployment_file or "deployment")
    if deployment.attention not in _ATTENTION:
        raise UserError("attention", deployment.attention, f"is none of {', '.join(_ATTENTION)}")
    return deployment


def refuse_engine_flags(flags: dict[str, Any]) -> None:
    """Raises UserError for a flag that only the real engine heeds: a GPU's kernel tables know no such choice."""
    from serving.errors import UserError

    for name in _OF_THE_REAL_ENGINE:
        if flags.get(name) is not None:
            raise UserError(name, flags[name], "is the real engine's; leave it out with --gpu")


def completed(deployment_file: str, otherwise: Deployment | None) -> Deployment:
    """The deployment in the file; if it names no model, the model is that of `otherwise`, and so what goes with it."""
    from serving.config import load_deployment

    stated = load_deployment(deployment_file)
    if otherwise is None or "model" in stated.model_fields_set:
        return stated
    taken = {name: getattr(otherwise, name) for name in ("model", "device") if name not in stated.model_fields_set}
    if stated.gpu_memory_utilization is None and "num_blocks" not in stated.scheduler.model_fields_set:
        taken["gpu_memory_utilization"] = otherwise.gpu_memory_utilization
    return stated.model_copy(update=taken)
