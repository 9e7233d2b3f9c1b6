"""Finding a policy, a router, a cost model or an attention backend: ours by name, an installed one by the name of its
entry point, a user's own as `path/to/file.py:Class` or `module:Class`.

The group of a policy's entry points is `tokentwin.policy`, and so on. Paths are relative to the working directory,
which is also searched for modules that are nowhere else. `located` makes such a name absolute when it is read, so that
a job or a worker that runs elsewhere finds the same file.
"""

from __future__ import annotations

import sys
from hashlib import blake2b
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from serving.errors import UserError, raised


def located(name: str) -> str:
    """`name`, with the absolute path of a file that it names, or of a module that only the working directory has."""
    place, colon, class_name = name.rpartition(":")
    if not colon:
        return name
    if place.endswith(".py"):
        return f"{Path(place).absolute()}:{class_name}"
    parts = place.split(".")
    file = Path(*parts).with_suffix(".py").absolute() if all(map(str.isidentifier, parts)) else None
    return f"{file}:{class_name}" if file and file.is_file() and not _is_found(parts[0], file) else name


def _is_found(top: str, file: Path) -> bool:
    """Whether Python finds a module or package `top` by itself, and not by way of `file`."""
    try:
        spec = find_spec(top)
    except ValueError:  # __main__ has none
        return True
    return spec is not None and spec.origin != str(file)


def find(kind: str, name: str, known: dict[str, str], needs: tuple[str, ...]) -> Any:
    """The class called `name`: one of `known` (name -> `module:Class`), or a user's own.

    Raises UserError when there is no such name, file, module or class, or the class lacks a method that it `needs`.
    """
    found = find_object(kind, name, known)
    missing = [method for method in needs if not callable(getattr(found, method, None))]
    if not isinstance(found, type) or missing:
        raise UserError(kind, name, f"must be a class with {', '.join(needs)}")
    return found


def check_name(kind: str, name: str, known: dict[str, str]) -> str:
    """Where `name` is, as `file:Class` or `module:Class`. Raises UserError where that cannot be told from the name."""
    place = known.get(name) or (located(name) if ":" in name else _installed(kind).get(name, ""))
    if not all(place.rpartition(":")[::2]):
        names = ", ".join([*known, *_installed(kind)])
        raise UserError(kind, name, f"must be {names}, or your own path/to/file.py:Class or package.module:Class")
    return place


def _installed(kind: str) -> dict[str, str]:
    """What installed packages offer: `module:Class` by name."""
    found = entry_points(group=f"tokentwin.{kind.replace(' ', '_')}")
    return {entry.name: f"{entry.module}:{entry.attr}" for entry in sorted(found, key=lambda entry: entry.name)}


def find_object(kind: str, name: str, known: dict[str, str]) -> Any:
    """Whatever is called `name`. Raises UserError when there is no such name, file or module, or it is not in that."""
    place, _, class_name = check_name(kind, name, known).rpartition(":")
    try:
        module = _module_in(Path(place)) if place.endswith(".py") else import_module(place)
    except FileNotFoundError as error:
        raise UserError(kind, name, f"the file {error.filename or place} does not exist") from None
    except ModuleNotFoundError as error:
        remedy = f"the module {error.name!r} cannot be imported; give its file, as in path/to/file.py:{class_name}"
        raise UserError(kind, name, remedy) from None
    except (Exception, SystemExit) as error:  # a user's module may fail in any way
        raise UserError(kind, name, f"cannot be imported: {raised(error)}") from None
    if not hasattr(module, class_name):
        raise UserError(kind, name, f"{'file' if place.endswith('.py') else 'module'} {place} has no {class_name}")
    return getattr(module, class_name)


def make(kind: str, name: str, found: Any, *arguments: Any, **settings: Any) -> Any:
    """An object of the user's own class `found`. Raises UserError when its constructor fails in any way."""
    try:
        return found(*arguments, **settings)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(kind, name, f"cannot be made: {raised(error)}") from error


def _module_in(file: Path) -> ModuleType:
    """The module in `file`, loaded once. It finds its neighbours, after everything that Python finds anyway."""
    name = f"user_module_{blake2b(str(file).encode(), digest_size=8).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    if not file.is_file():
        raise FileNotFoundError(2, "", str(file))
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    spec = spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
