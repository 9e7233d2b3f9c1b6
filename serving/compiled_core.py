"""The compiled core: the hot modules of `serving` and `sim`, compiled by mypyc from their sources (`compile_core.py`).

Python imports the compiled modules from `serving/_compiled` if they were compiled for this Python from the present
sources, and TOKENTWIN_PURE is unset or 0. Otherwise it imports the sources.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from hashlib import blake2b
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
SUFFIX = EXTENSION_SUFFIXES[0]  # names the Python and the platform
COMPILED = ROOT / "serving" / "_compiled"
DIGEST = "sources.txt"  # the file that holds the digest of what was compiled
_AGAIN = "`pip install --force-reinstall --no-deps FOLDER`"
COMPILED_CORE, BY_CHOICE = "compiled core", "pure Python: TOKENTWIN_PURE is set"


def sources_digest() -> str:
    """Return the digest of this Python's version and of all sources that compiled code may rely on.

    These include modules that are not compiled, because compiled code relies on their types.
    """
    digest = blake2b(SUFFIX.encode(), digest_size=16)
    for package in ("serving", "sim"):
        for folder, _, files in sorted(os.walk(ROOT / package)):
            for name in sorted(files):
                if name.endswith(".py"):
                    with open(f"{folder}/{name}", "rb") as file:  # noqa: PTH123  # a Path each costs as much as reading
                        digest.update(f"\0{name}\0".encode() + file.read())
    return digest.hexdigest()


class _Finder:
    """A finder of compiled modules. Python asks it before it looks for sources."""

    def __init__(self) -> None:
        paths = COMPILED.rglob(f"*{SUFFIX}")
        self._files = {".".join(path.relative_to(COMPILED).parts).removesuffix(SUFFIX): path for path in paths}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self._files.get(name)
        return None if file is None else spec_from_file_location(name, file)


def _use() -> str:
    if os.environ.get("TOKENTWIN_PURE", "0") not in ("", "0"):
        return BY_CHOICE
    try:
        made_of = (COMPILED / DIGEST).read_text()
    except FileNotFoundError:
        here = (ROOT.parent / "compile_core.py").is_file()
        remedy = "run `make core`" if here else "install a C compiler, then tokentwin's source again: " + _AGAIN
        return f"pure Python, about half as fast, because the core is not compiled; {remedy}"
    if made_of != sources_digest():
        return "pure Python, about half as fast: the core is of other sources or another Python; run `make core`"
    sys.meta_path.insert(0, _Finder())
    return COMPILED_CORE


CORE = _use()
"""The core that runs; if it is not the compiled core, with the reason."""
