"""Starting processes of this interpreter that find the same packages as this process, in any working directory.

`python -m` looks for modules in the working directory first, so it would run a user's `queue.py` there, not Python's.
`multiprocessing` runs the main module again in every process that it spawns, so a user's script without a `__main__`
guard would start the processes again.
"""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HOME = Path(__file__).parents[2].resolve()  # the directory that holds `tokentwin`


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs `module` and does not look for modules in the working directory.

    Run it in the environment that `module_environment` returns.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def module_environment() -> dict[str, str]:
    """Return this process's environment, with our packages' directory in PYTHONPATH if Python would not find it."""
    paths = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    places = [*site.getsitepackages(), site.getusersitepackages(), *paths]
    if HOME not in [Path(place).resolve() for place in places]:
        paths.append(str(HOME))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)} if paths else dict(os.environ)


@contextmanager
def without_main() -> Iterator[None]:
    """Keep processes that `multiprocessing` spawns in this context from running the main module again.

    They need only our modules.
    """
    main = sys.modules["__main__"]
    hidden: dict[str, Any] = {name: vars(main)[name] for name in ("__spec__", "__file__") if name in vars(main)}
    main.__spec__ = None
    vars(main).pop("__file__", None)
    try:
        yield
    finally:
        vars(main).update(hidden)
