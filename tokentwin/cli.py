"""The command line: one file per verb in `tokentwin/commands`, which is imported only when the verb is called."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
import sys
from importlib import import_module
from io import TextIOWrapper
from time import monotonic
from types import FrameType
from typing import Any, NoReturn

import click
from click.core import ParameterSource

from tokentwin.serving.compiled_core import CORE
from tokentwin.serving.errors import UserError, reason, shortened
from tokentwin.serving.user_code.call_limit import end_threads, print_error, watch

VERBS = {
    "bench": "Replay a trace on the real engine, or send it to a server, and record it.",
    "calibrate": "Measure the engine and fit the step cost model.",
    "columns": "Explain the columns of a dataset.",
    "compare": "Compare two deployments, policies or runs on the same requests.",
    "conformance": "Compare our scheduler's decisions with recordings of vLLM's.",
    "dashboard": "Open the dashboard.",
    "demo": "Record real runs on this machine, calibrate, simulate the same traffic, and compare.",
    "diagnose": "Find out why a run is slow, and what would help.",
    "explain": "Show where the time of a step goes, operation by operation.",
    "export": "Write a run, a sweep or a saved answer in another format.",
    "generate": "Answer a prompt with the real engine.",
    "gpus": "List the GPUs known by name.",
    "learn": "Find out what a running server is by asking it, and make a twin of it.",
    "model": "Fetch a model, or see how much GPU memory one needs.",
    "plan": "Find the cheapest fleet that meets its SLOs.",
    "policy": "Check that a scheduling policy keeps its contract.",
    "router": "Check that a router keeps its rules.",
    "serve": "Serve the real engine, or the twin of a fleet, with OpenAI's API.",
    "simulate": "Run a trace through the simulator and record it.",
    "sweep": "Simulate many configurations and write a Parquet dataset.",
    "trace": "Inspect, convert or generate a trace of requests.",
    "validate": "Compare the simulator with real runs.",
    "watch": "Look whether a server still behaves as its twin.",
}

_TRACEBACK = "--traceback"  # valid before and after the verb
_EVERY_S = 5.0
_MAY_BE_EMPTY = ("system", "password")


def _check_filled(context: click.Context, option: click.Parameter, value: Any) -> Any:
    """Raise UserError for an option whose value, or an item of its list, is an empty text."""
    given = context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
    if given and any(
        isinstance(one, str) and not one.strip() for one in (value if isinstance(value, tuple) else (value,))
    ):
        raise UserError(max(option.opts, key=len).lstrip("-"), "", "must not be empty; leave it out")
    return value


class _Verbs(click.Group):
    """A group that imports `tokentwin.commands.VERB` only when the verb is used, so that --help is fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        command = getattr(import_module(f"tokentwin.commands.{name}"), name)
        for inner in command.commands.values() if isinstance(command, click.Group) else (command,):
            for parameter in inner.params:
                if isinstance(parameter, click.Option) and parameter.name not in _MAY_BE_EMPTY:
                    parameter.callback = _check_filled
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(VERBS.items()))


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="tokentwin", message=f"%(prog)s, version %(version)s, {CORE}")
@click.option(_TRACEBACK, is_flag=True, help="If a policy, router or cost model of yours fails, print the traceback.")
def cli(traceback: bool) -> None:
    """Predict how an LLM serving system performs: one scheduler runs a real engine and a simulator."""


def main(command: click.Command = cli) -> None:
    """Run the console script, or a command of the lab, in a process that ends even if a user's code does not."""
    watch(print_error)
    try:
        run(command)
    finally:
        end_threads()


def run(command: click.Command = cli) -> None:
    """Run a command with the arguments of this process. Bad input ends in one line on stderr and exit status 2."""
    os.environ["PYTHONSAFEPATH"] = "1"  # processes that it starts do not import from the working directory
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # the lookup would read all installed packages
    # Garbage collection would take a fifth of a command's time. Imports leave no garbage, and the end of the process
    # frees all memory.
    gc.set_threshold(200_000)
    atexit.register(gc.freeze)
    signal.signal(signal.SIGTERM, _terminated)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack some characters
    log = logging.getLogger("tokentwin")
    log.handlers = [_Paced()]
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        _check_text(sys.argv[1:])
        command.main([argument for argument in sys.argv[1:] if argument != _TRACEBACK], standalone_mode=False)
    except UserError as error:
        if _TRACEBACK in sys.argv and error.own_traceback:
            click.echo(error.own_traceback.rstrip(), err=True)
        _refuse(str(error))
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # `| head` has closed the pipe, and nothing is left to flush
        sys.exit(1)
    except OSError as error:  # a full disk, a directory that may not be read, a name that is too long
        _refuse(str(UserError("file", str(error.filename or ""), f"cannot be read or written: {reason(error)}")))
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "tokentwin"
        _refuse(f"{shortened(' '.join(error.format_message().split()), 250)} (see {path} --help)")
    except (click.Abort, KeyboardInterrupt):
        click.echo("tokentwin: interrupted", err=True)
        sys.exit(130)


class _Paced(logging.Handler):
    """A handler that prints all warnings on stderr, and progress no more often than every `_EVERY_S` seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._last = monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            click.echo(f"tokentwin: {record.getMessage()}", err=True)
        elif monotonic() - self._last >= _EVERY_S:
            self._last = monotonic()
            click.echo(f"tokentwin: {record.getMessage()}", err=True)


def _terminated(number: int, frame: FrameType | None) -> None:
    """End a command on SIGTERM, which batch systems and containers send, as on Ctrl-C, so that files are complete."""
    pressed = signal.getsignal(signal.SIGINT)
    if not callable(pressed):  # a shell lets background processes ignore Ctrl-C
        raise KeyboardInterrupt
    pressed(signal.SIGINT, frame)


def _check_text(arguments: list[str]) -> None:
    """Raise UserError for an argument that is not UTF-8, which Python passes on as surrogates."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise UserError("argument", argument, "must be UTF-8 text; rename the file, or write it in UTF-8") from None


def _refuse(line: str) -> NoReturn:
    text = f"tokentwin: {shortened(line, 600)}"
    click.echo(text.encode("utf-8", "backslashreplace").decode(), err=True)  # some names are not UTF-8
    sys.exit(2)


if __name__ == "__main__":
    main()
