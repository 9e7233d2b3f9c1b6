"""The command line that gives an answer again, as it is noted in what is saved of it."""

from __future__ import annotations

import shlex

import click


def command_line(context: click.Context, leave_out: tuple[str, ...] = ()) -> str:
    """The command with its arguments and the options that are not as by default, without those of `leave_out`."""
    words = ["tokentwin", context.info_name or ""]
    for parameter in context.command.params:
        name = parameter.name or ""
        given = context.params.get(name)
        if name in leave_out or given == parameter.get_default(context) or given in (None, ()):
            continue
        for value in given if parameter.multiple or parameter.nargs != 1 else (given,):
            if isinstance(parameter, click.Option):
                words.append(max(parameter.opts, key=len))
            if value is not True:
                words.append(f"{value:g}" if isinstance(value, float) else str(value))
    return shlex.join(words)
