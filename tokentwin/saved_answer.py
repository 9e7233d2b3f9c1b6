"""The answer of a command: it is printed and saved, with the command line that reproduces it."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import click

from tokentwin.serving.answers.document import Document
from tokentwin.serving.answers.markdown import markdown
from tokentwin.serving.whole_file import check_free, write_whole

_ANY = ("style", "save", "force", "jobs")  # options that do not change the answer


def _command_line() -> str:
    """Return the command with its arguments and those options that change the answer and differ from their defaults."""
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


@dataclass
class AnswerOutput:
    """The output of an answer: its `style` (`table`, `markdown` or `json`), and the file to save it to.

    `force` replaces a file that exists; what was saved before is replaced anyway.
    """

    style: str
    save: Path | None = None
    force: bool = False

    @property
    def whole(self) -> bool:
        """True if the complete answer is needed, not only the part that tables show."""
        return self.style == "json" or self.save is not None

    def finish(self, answer: Document) -> None:
        """Print and save `answer`; an answer with the field `inputs` gets the command line."""
        self.keep(answer)
        self.show(answer)

    def keep(self, answer: Document) -> None:
        """Save `answer` if it shall be saved, in place of what was known before."""
        if self.save is not None:
            text = _with_command(answer).dumps()
            write_whole(self.save, lambda file: file.write_text(text, encoding="utf-8"), self.force)
            self.force = True

    def show(self, answer: Document) -> None:
        """Print `answer`."""
        match self.style:
            case "json":
                click.echo(_with_command(answer).dumps())
            case "markdown":
                click.echo(markdown(answer.report()), nl=False)
            case _:
                from tokentwin.serving.answers.terminal import print_report

                print_report(answer.report())


def _with_command(answer: Document) -> Document:
    if "inputs" not in type(answer).model_fields:
        return answer
    return answer.model_copy(update={"inputs": {"command": _command_line()}})


def answering(command: Callable[..., None]) -> Callable[..., None]:
    """Add --save, --force and --format, which the command gets as `output`.

    The command checks first whether the file can be saved.
    """

    @click.option("--save", type=click.Path(path_type=Path), help="Save the complete answer to this JSON file.")
    @click.option("--force", is_flag=True, help="Replace files that exist.")
    @click.option("--format", "style", type=click.Choice(["table", "markdown", "json"]), default="table")
    @wraps(command)
    def answered(*args: Any, style: str, save: Path | None, force: bool, **given: Any) -> None:
        if save is not None:
            check_free(save, force)
        command(*args, output=AnswerOutput(style, save, force), **given)

    return answered
