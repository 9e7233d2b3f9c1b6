"""A policy in a user's own Python file: kept under its hash, and run in the processes of jobs.

The server runs such code only if it was started with `FLAG`. This process reads the file, and never imports it.
"""

from __future__ import annotations

import ast
from pathlib import Path

import streamlit as st

from tokentwin.dashboard.kept_inputs import Incomplete
from tokentwin.dashboard.shown import capitalised
from tokentwin.dashboard.uploads import keep_file, kept_file
from tokentwin.dashboard.url import fresh_key, keep, named
from tokentwin.serving.errors import UserError

FLAG = "--own-policies"
MOST_KB = 200
_KEPT = "policy-*/policy.py"
_FIELD = "policy"
OWN = "own"  # an option beside the names of policies
TITLE = "a policy file of your own"
_CLOSED = (
    f"A policy of your own is code that runs on this server. To allow it, start the dashboard with "
    f"`tokentwin dashboard RUNS_DIR {FLAG}`. Without it, use the command line: "
)
_HELP = "A Python file with a class, as docs/policies.md describes. `tokentwin policy check FILE.py:Class` checks it."


def policies_title(name: str) -> str:
    """Return the title of an option of a choice of policies."""
    return TITLE if name == OWN else name


def policy_input(runs: Path, parameter: str, what: str, allowed: bool, command: str) -> str | Incomplete:
    """Draw the upload of `what`, such as `policy file of A`, and return the policy as `path.py:Class`.

    If it is not `allowed`, a sentence says how to allow it, or how to use the command line: by `command`. Raises
    UserError for no such file.
    """
    said, _, wanted = (named(parameter) or "").partition(":")
    if not allowed:
        keep(parameter, named(parameter) or "")
        return Incomplete(f"{_CLOSED}{command}.")
    upload = st.file_uploader(
        capitalised(what),
        ["py"],
        key=fresh_key(f"{parameter}_upload", parameter),
        max_upload_size=1,
        help=_HELP,
    )
    if upload is not None:
        said = keep_policy(runs, upload.getvalue())
    path = kept_file(runs, _KEPT, said)
    keep(parameter, named(parameter) or "")
    if path is None:
        return Incomplete(
            f"The {what} of this link is not on this server. Upload it." if said else f"Upload the {what}."
        )
    names = classes(path.read_bytes())
    key = fresh_key(f"{parameter}_class", parameter)
    chosen = st.selectbox("Class", names, names.index(wanted) if wanted in names else len(names) - 1, key=key)
    keep(parameter, f"{said}:{chosen}")
    return f"{path.resolve()}:{chosen}"


def keep_policy(runs: Path, content: bytes) -> str:
    """Keep a policy's file, and return its digest. Raises UserError if it is too large, or no Python with a class."""
    if len(content) > MOST_KB * 1000:
        raise UserError(_FIELD, f"{len(content) / 1000:.0f} kB", f"is too large; at most {MOST_KB} kB are allowed")
    if not classes(content):
        raise UserError(_FIELD, "the file", "defines no class; see docs/policies.md")
    return keep_file(runs, _KEPT, content)


def classes(content: bytes) -> list[str]:
    """Return the names of the public classes that a Python file defines, without running it.

    Raises UserError if it is no Python.
    """
    try:
        nodes = ast.parse(content).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise UserError(_FIELD, "the file", f"is no valid Python{line}") from None
    return [node.name for node in nodes if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
