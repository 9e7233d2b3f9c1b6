"""Options of several commands: those that fill the fields of a request, and those of a deployment.

Help and default of an option are said once, by the field that it fills.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar, get_args, get_origin

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from planning.deployments import FLAGS, SCHEDULER_FLAGS
from serving.deployments.config import Deployment, SchedulerConfig, parse
from serving.errors import UserError

Command = TypeVar("Command", bound=Callable[..., Any])
Requested = TypeVar("Requested", bound=BaseModel)


class Finite(click.FloatRange):
    """Numbers that are numbers: click's own ranges let NaN and infinity pass."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


class RequestOption(click.Option):
    """A flag whose help is its field's description; `default_of` begins the words that say the default."""

    def __init__(self, *args: Any, fields: Mapping[str, FieldInfo], default_of: str = "default", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        field = fields[self.name or ""]
        values = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        text = "; ".join([field.description or "", *([" | ".join(values)] if values else [])])
        self.help = text[:1].upper() + text[1:]
        if isinstance(field.default, str | int | float) and field.default != "":
            self.help += f" [{default_of}: {field.default}]"


class SectionedCommand(click.Command):
    """A command whose help shows options by `sections`: headings and parameters. `rest` heads the rest."""

    def __init__(self, *args: Any, sections: Mapping[str, Sequence[str]], rest: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sections = sections
        self._rest = rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = {param.name or "": param.get_help_record(ctx) for param in self.get_params(ctx)}
        shown = [(title, [options.pop(name) for name in names]) for title, names in self._sections.items()]
        for title, records in [*shown, (self._rest, list(options.values()))]:
            with formatter.section(title):
                formatter.write_dl([record for record in records if record is not None])


def options_of(*models: type[BaseModel], **more: Any) -> Callable[..., Callable[[Command], Command]]:
    """`click.option` for the fields of a request, which are named as the option's parameter is."""
    fields = {name: field for model in models for name, field in model.model_fields.items()}
    return partial(click.option, cls=RequestOption, fields=fields, **more)


def requested(request: type[Requested], given: Mapping[str, Any]) -> Requested:
    """The request with what was given on the command line; the rest is as the request has it by default.

    Raises UserError that names the option that is wrong.
    """
    try:
        return parse(request, {name: value for name, value in given.items() if value not in (None, ())}, where="")
    except UserError as error:
        raise UserError(error.field.removeprefix(".").replace("_", "-"), error.value, error.remedy) from None


def listed(texts: tuple[str, ...]) -> list[str]:
    """Names given one by one or separated by commas, each once."""
    return list(dict.fromkeys(name for text in texts for name in text.replace(",", " ").split()))


def deployment_options(command: Command) -> Command:
    """Add --deployment and the flags that override single fields of it."""
    setting = options_of(SchedulerConfig, Deployment, default_of="a deployment's default")
    command = setting("--async-scheduling/--no-async-scheduling", default=None)(command)
    for name in reversed(SCHEDULER_FLAGS):
        command = setting(f"--{name.replace('_', '-')}", type=int)(command)
    for name, kind in reversed(FLAGS.items()):
        command = setting(f"--{name.replace('_', '-')}", type=kind)(command)
    return click.option(
        "--deployment", "-d", "deployment_file", type=click.Path(), help="Deployment, in YAML, or that of a recording."
    )(command)
