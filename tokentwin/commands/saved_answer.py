"""An answer on the command line: printed, saved, and with the command line that gives it again noted in it."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from serving.document import Document, print_document
from serving.whole_file import write_whole

_ANY = ("style", "save", "force", "jobs")  # options that change no answer


def _command_line() -> str:
    """The command under way with its arguments, and those options that are not as by default and change the answer."""
    context = click.get_current_context()
    words = ["tokentwin", context.info_name or ""]
    for parameter in context.command.params:
        name = parameter.name or ""
        given = context.params.get(name)
        if name in _ANY or given == parameter.get_default(context) or given in (None, ()):
            continue
        for value in given if parameter.multiple or parameter.nargs != 1 else (given,):
            if isinstance(parameter, click.Option):
                words.append(max(parameter.opts, key=len))
            if value is not True:
                words.append(f"{value:g}" if isinstance(value, float) else str(value))
    return shlex.join(words)


def finish(answer: Document, style: str, save: Path | None = None, force: bool = False) -> None:
    """Save the whole of it, where that was asked for, and print it: `style` is `table` or `json`.

    Of inputs it states the command line.
    """
    if "inputs" in type(answer).model_fields:
        answer = answer.model_copy(update={"inputs": {"command": _command_line()}})
    if save is not None:
        write_whole(save, lambda file: file.write_text(answer.dumps(), encoding="utf-8"), force)
    if style == "json":
        click.echo(answer.dumps())
    else:
        print_document(answer)
