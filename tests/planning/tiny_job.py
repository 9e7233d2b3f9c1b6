"""Tasks of the tests of jobs and workers, in a module that imports next to nothing: each process imports it anew."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokentwin.planning.jobs.files import write_json
from tokentwin.serving.errors import UserError


def tiny(settings: dict[str, Any], out: Path, tell: Callable[[str, float], None]) -> dict[str, Any]:
    """A task that says which process runs it, waits until it may end, and fails as it is asked to."""
    with (out / "starts").open("a") as starts:
        starts.write(f"{os.getpid()}\n")
    if settings.get("child"):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        write_json(out / "child.json", child.pid)
    tell("waiting", 0.25)
    while settings.get("wait") and not (out / "go").exists():
        time.sleep(0.02)
    if settings.get("mistake"):
        raise UserError("rate", settings["mistake"], "is no rate")
    if settings.get("bug"):
        raise ZeroDivisionError("two\nlines")
    if settings.get("nan"):
        return {"answer": float("nan")}
    if settings.get("fill"):
        (out / "large").write_bytes(bytes(1 << 30))
    return {"answer": settings["number"] * 2}


def sleep(begun: Path) -> None:
    """A task that sleeps, and that nobody waits for."""
    begun.touch()
    time.sleep(600)
