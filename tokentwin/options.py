"""Options of several commands: options that fill the fields of a request, and options of a deployment.

The help and the default of an option come from the field that it fills.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tokentwin.planning.deployments import FLAGS, SCHEDULER_FLAGS
from tokentwin.planning.made_up import MadeUp, made_up
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig, parse
from tokentwin.serving.errors import UserError

_SHORT = {"calibration": ("-c",), "deployment": ("-d",), "out": ("-o",)}
_PATHS = ("calibration", "deployment", "traffic", "api_key_file", "tls_cert", "tls_key")  # fields that hold a path
Command = TypeVar("Command", bound=Callable[..., Any])
Requested = TypeVar("Requested", bound=BaseModel)


class Finite(click.FloatRange):
    """A range of finite numbers, because click's own ranges accept NaN and infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


class RequestOption(click.Option):
    """A flag whose help is the description of its field; the text `default_of` introduces the default."""

    def __init__(self, *args: Any, fields: Mapping[str, FieldInfo], default_of: str = "default", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        field = fields[self.name or ""]
        values = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        text = "; ".join([field.description or "", *([" | ".join(values)] if values else [])])
        self.help = text[:1].upper() + text[1:]
        if isinstance(field.default, str | int | float) and field.default != "":
            self.help += f" [{default_of}: {field.default}]"


class SectionedCommand(click.Command):
    """A command whose help shows options by `sections`: headings and parameters. `rest` heads the other options."""

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


def options_of(
    *requests: type[BaseModel], default_of: str = "default", **more: Any
) -> Callable[..., Callable[[Command], Command]]:
    """Return a function that makes decorators, which add options for fields of the requests to a command.

    The function takes the options as a text such as `--limit --gpu=gpus`. Without a text, the decorator adds an option
    for every field. The fields decide the type of an option, and whether it is required or can be repeated, unless
    `more` says otherwise.
    """
    fields = {name: field for request in requests for name, field in request.model_fields.items()}

    def options(spelled: str = "") -> Callable[[Command], Command]:
        def add(command: Command) -> Command:
            for said in reversed(spelled.split() or [f"--{name.replace('_', '-')}" for name in fields]):
                flag, _, name = said.partition("=")
                name = name or flag[2:].replace("-", "_")
                how = _kind(name, fields[name]) | {"fields": fields, "default_of": default_of} | more
                if how.get("is_flag") and "default" in how:
                    flag = f"{flag}/--no-{flag[2:]}"
                command = click.option(flag, *_SHORT.get(name, ()), name, cls=RequestOption, **how)(command)
            return command

        return add

    return options


def _kind(name: str, field: FieldInfo) -> dict[str, Any]:
    """Return click's arguments for the values of a field."""
    kinds = {part for part in (get_args(field.annotation) or (field.annotation,)) if part is not type(None)}
    (kind,) = kinds if len(kinds) == 1 else (str,)
    if kind is bool:
        return {"is_flag": True}
    several = bool({get_origin(field.annotation), get_origin(kind)} & {tuple, dict})
    how = {"required": field.is_required(), "multiple": several}
    if name in _PATHS or Path in (kind, *get_args(field.annotation)):
        return how | {"type": click.Path()}
    return how | ({"type": kind} if kind in (int, float) and not several else {})


def requested(request: type[Requested], given: Mapping[str, Any]) -> Requested:
    """Make the request from the values on the command line; other fields keep their defaults.

    Raises a UserError that names the wrong option.
    """
    try:
        return parse(request, {name: value for name, value in given.items() if value not in (None, ())}, where="")
    except UserError as error:
        raise UserError(error.field.removeprefix(".").replace("_", "-"), error.value, error.remedy) from None


def listed(option: str, texts: tuple[str, ...]) -> list[str]:
    """Return distinct names, given one by one or separated by commas, or by blanks if they are not names of GPUs.

    Raises UserError for a comma without a name.
    """
    for text in texts:
        if not all(part.strip() for part in text.split(",")):
            raise UserError(option, text, "has a comma without a name before or after it; leave the comma out")
    parts = (part.strip() for text in texts for part in text.split(","))
    return list(dict.fromkeys(name for part in parts for name in ((part,) if option == "gpu" else part.split())))


def traffic_options(name: str) -> Callable[[Command], Command]:
    """Return a decorator that adds options of traffic without a trace.

    The command gets their specification as parameter `name` in place of a trace, which then must not be given.
    """

    def add(command: Command) -> Command:
        @options_of(MadeUp, required=False)("--prompt --output --rate --users --think=think_s --concurrency")
        @wraps(command)
        def with_traffic(**given: Any) -> Any:
            own = {field: value for field in MadeUp.model_fields if (value := given.pop(field)) is not None}
            if own and given[name] is not None:
                field, value = next(iter(own.items()))
                remedy = "makes traffic up, but a trace is given; leave one of them out"
                raise UserError(field.removesuffix("_s"), value, remedy)
            if own:
                given[name] = made_up(own)
            return command(**given)

        return cast(Command, with_traffic)

    return add


NO_TRAFFIC = "is missing; give a trace, or --prompt and --output with one of --rate, --users and --concurrency"


def deployment_options(command: Command) -> Command:
    """Add --deployment and the flags that override single fields of it."""
    names = (f"--{name.replace('_', '-')}" for name in (*FLAGS, *SCHEDULER_FLAGS, "async_scheduling"))
    settings = options_of(SchedulerConfig, Deployment, default_of="a deployment's default", default=None)
    command = settings(" ".join(names))(command)
    return click.option(
        "--deployment",
        "-d",
        "deployment_file",
        type=click.Path(),
        help="YAML file with the deployment, or a recording, whose deployment is then used.",
    )(command)
