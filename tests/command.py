"""The command line run in this process, for tests of a command's output and files.

Tests of the process itself start one: Python and its imports take longer than most commands do.
"""

import io
import logging
import os
import signal
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from tokentwin.cli import run


class Done(NamedTuple):
    """The exit status and output of a command, as in `subprocess.CompletedProcess`."""

    returncode: int
    stdout: str
    stderr: str


def tokentwin(*arguments: object, cwd: Path | str = ".", encoding: str = "utf-8") -> Done:
    """Run the console script with these arguments, on a terminal of this `encoding`, and return its output.

    Changes to the environment, the log handlers and the SIGTERM handler are undone afterwards.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2))
    handler, status = signal.getsignal(signal.SIGTERM), 0
    with (
        patch.object(sys, "argv", ["tokentwin", *map(str, arguments)]),
        patch.dict(os.environ),
        patch.object(logging.getLogger("tokentwin"), "handlers", []),
        chdir(cwd),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            run()
        except SystemExit as end:
            status = int(end.code or 0)
        finally:
            signal.signal(signal.SIGTERM, handler)
    said = []
    for stream in (out, err):
        stream.flush()
        stream.seek(0)
        said.append(stream.read())
    return Done(status, *said)
