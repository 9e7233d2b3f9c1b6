"""One wrong command, and how it must end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.command import tokentwin

LONGEST = 320  # maximum number of characters of the line: three lines of a terminal
Content = str | bytes | Callable[[Path], object]

TRAFFIC = (
    "{requests: 5, arrivals: {kind: poisson, rate: 5}, prompt: {kind: fixed, tokens: 9}, "
    "output: {kind: fixed, tokens: 9}}"
)
SIMULATE = "simulate t.yaml --gpu H100 --model Llama-3.1-8B -o out"
PLAN = "plan t.yaml --slo 'ttft_ms p99<=900' --gpu H100 --model Llama-3.1-8B"


class Case(NamedTuple):
    """A command line in a folder with `files` (by name: text, bytes, or what makes them), beside the trace `t.yaml`.

    says: what the line must name; of each text, one of the alternatives divided by `|`. wrong: what is wrong, for a
    reader of a failure.
    """

    command: str
    files: Mapping[str, Content]
    says: tuple[str, ...]
    wrong: str = ""
    status: int = 2


def make(case: Case, folder: Path) -> None:
    for name, content in {"t.yaml": TRAFFIC, **case.files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if callable(content):
            content(path)
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content, encoding="utf-8")


def problem(case: Case, words: list[str], folder: Path) -> str:
    """Run the case; return what is not as it must be: one line that names the fault, and no files left behind."""
    make(case, folder)
    before = files(folder)
    try:
        done = tokentwin(*words, cwd=folder)
    except Exception as error:
        return f"ends in a traceback: {error!r}"
    line = done.stderr.rstrip("\n")
    if done.returncode != case.status:
        return f"exit status {done.returncode}: {line[-300:]} {done.stdout[-300:]}"
    if not line.startswith("tokentwin: ") or "\n" in line or len(line) > LONGEST:
        return f"is not one line of at most {LONGEST} characters: {line}"
    if not line.isprintable() or "\x1b" in done.stdout:
        return "steers the terminal"
    if missed := [names for names in case.says if not any(name in _plain(line) for name in _plain(names).split("|"))]:
        return f"does not name {missed}: {line}"
    return f"leaves {files(folder) ^ before}" if files(folder) != before else ""


def files(folder: Path) -> set[str]:
    """Return all files in `folder`, except Python's bytecode."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts}


def _plain(text: str) -> str:
    return text.replace("-", "_").lower()
