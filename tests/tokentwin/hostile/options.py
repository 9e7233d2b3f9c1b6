"""Every option of every command with values of a wrong type, where all else is right."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import click

from tests.tokentwin.hostile.case import PLAN, SIMULATE, Case
from tokentwin.cli import VERBS, cli

# What makes the rest of each command right, or wrong only later. Those that would begin what takes long are left out.
RIGHT = {
    "compare": "compare --trace t.yaml --gpu H100 --model Llama-3.1-8B --b policy=sjf",
    "explain": "explain --model Llama-3.1-8B --gpu H100",
    "generate": "generate hello --model nothing",
    "model inspect": "model inspect Llama-3.1-8B",
    "plan": PLAN,
    "serve": "serve --twin --gpu H100 --model Llama-3.1-8B --tls-cert no.pem --tls-key no.pem",  # never starts
    "simulate": SIMULATE,
    "trace convert": "trace convert t.yaml o.parquet",
    "trace inspect": "trace inspect t.yaml",
    "trace synth": "trace synth o.parquet --requests 5 --arrivals poisson:rate=2 --prompt fixed:tokens=3 "
    "--output fixed:tokens=3",
}
WHOLE = ("x", "1.5", "1e3", "nan", "", "0x10", "--")
NUMBERS = ("x", "nan", "inf", "", "1,5", "--")
CHOICES = ("nothing", "", "TABLE ", "json\n")
TEXTS = ("",)
_MAY_BE_EMPTY = ("system", "password")
_FREE = ("spec",)


def commands() -> Iterator[tuple[str, click.Command]]:
    for verb in VERBS:
        command = cli.get_command(click.Context(cli), verb)
        if isinstance(command, click.Group):
            yield from ((f"{verb} {name}", inner) for name, inner in command.commands.items())
        elif command is not None:
            yield verb, command


def cases() -> Iterator[Case]:
    for name, command in commands():
        for parameter in command.params if name in RIGHT else ():
            if not isinstance(parameter, click.Option) or parameter.is_flag or parameter.name in _FREE:
                continue
            option = max(parameter.opts, key=len)
            for bad in _wrong(parameter):
                line = f"{RIGHT[name]} {option}={shlex.quote(bad)}"
                yield Case(line, {}, (f"{option.lstrip('-')}|{parameter.name}|output",), repr(bad))
        yield Case(f"{RIGHT.get(name, name)} --nosuch 1", {}, ("--nosuch",))


def _wrong(option: click.Option) -> tuple[str, ...]:
    if isinstance(option.type, click.Choice):
        return CHOICES
    if isinstance(option.type, click.IntRange) or option.type is click.INT:
        return WHOLE
    if isinstance(option.type, click.FloatRange) or option.type is click.FLOAT:
        return NUMBERS
    return () if option.name in _MAY_BE_EMPTY else TEXTS
