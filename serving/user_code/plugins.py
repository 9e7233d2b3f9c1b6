"""Finding a policy, a router, a cost model or an attention backend by its name.

Built-in ones are found by name, installed ones by the name of their entry point, and a user's own as
`path/to/file.py:Class` or `module:Class`. The entry points of policies are in the group `tokentwin.policy`; the groups
of the other kinds are named in the same way. Paths are relative to the working directory. Modules that Python finds
nowhere else are looked for there, too. `located` makes such a name absolute when it is read, so that a job or a worker
that runs in another directory finds the same file.

A user's code is trusted: it runs in our process, and what it does to our functions is not detected.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from hashlib import blake2b
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel

from tokentwin.serving.errors import UserError, shown
from tokentwin.serving.user_code.call_limit import Fault, limited_longer, own_code

_USERS = "user_module_"  # prefix of the names of modules that are loaded from a user's file

_LOADING: ContextVar[str] = ContextVar("loading", default="")


def located(name: str) -> str:
    """Return `name` with an absolute path if it names a file, or a module that is only in the working directory."""
    place, colon, class_name = name.rpartition(":")
    if not colon:
        return name
    if place.endswith(".py"):
        return f"{Path(place).absolute()}:{class_name}"
    parts = place.split(".")
    file = Path(*parts).with_suffix(".py").absolute() if all(map(str.isidentifier, parts)) else None
    return f"{file}:{class_name}" if file and file.is_file() and not _is_found(parts[0], file) else name


def _is_found(top: str, file: Path) -> bool:
    """Return whether Python finds a module or package called `top` that is not `file`."""
    try:
        spec = find_spec(top)
    except ValueError:  # __main__ has none
        return True
    return spec is not None and spec.origin != str(file)


def find(kind: str, name: str, known: dict[str, str], needs: tuple[str, ...]) -> Any:
    """Return the class called `name`: one of `known` (name -> `module:Class`), or a user's own.

    Raises UserError if there is no such name, file, module or class, or if the class lacks one of the methods `needs`.
    """
    named = find_object(kind, name, known)
    missing = [method for method in needs if not callable(getattr(named, method, None))]
    if not isinstance(named, type) or missing:
        raise UserError(kind, name, f"must be a class with {', '.join(needs)}")
    return named


def check_name(kind: str, name: str, known: dict[str, str]) -> str:
    """Return where `name` is, as `file:Class` or `module:Class`. Raises UserError if it is unknown or malformed."""
    place = known.get(name) or (located(name) if ":" in name else _installed(kind).get(name, ""))
    if not all(place.rpartition(":")[::2]):
        names = ", ".join([*known, *_installed(kind)])
        raise UserError(kind, name, f"must be {names}, or your own path/to/file.py:Class or package.module:Class")
    return place


def _installed(kind: str) -> dict[str, str]:
    """Return the objects of this kind that installed packages offer, as a mapping of name to `module:Class`."""
    points = entry_points(group=f"tokentwin.{kind.replace(' ', '_')}")
    return {entry.name: f"{entry.module}:{entry.attr}" for entry in sorted(points, key=lambda entry: entry.name)}


def find_object(kind: str, name: str, known: dict[str, str]) -> Any:
    """Return the object called `name`. Raises UserError if there is no such name, file, module or object."""
    place, _, class_name = check_name(kind, name, known).rpartition(":")
    if name not in known:
        own_code.append(name)
    try:
        module = limited_longer(_import, place)
        there = limited_longer(hasattr, module, class_name)
    except Fault as fault:  # a user's module may fail in any way
        error = fault.__cause__
        if isinstance(error, UserError):
            raise error from None
        if isinstance(error, FileNotFoundError):
            remedy = f"the file {error.filename or place} does not exist"
        elif isinstance(error, ModuleNotFoundError):
            ours = find_spec(f"tokentwin.{(error.name or '').partition('.')[0]}")
            instead = f"import {ours.name}" if ours else f"give its file, as in path/to/file.py:{class_name}"
            remedy = f"the module {error.name!r} cannot be imported; {instead}"
        else:
            remedy = f"cannot be imported: {fault.what.removeprefix('raised ')}"
        raise UserError(kind, name, remedy) from None
    if not there:
        raise UserError(kind, name, f"{'file' if place.endswith('.py') else 'module'} {place} has no {class_name}")
    return getattr(module, class_name)


def make(kind: str, name: str, named: Any, *arguments: Any, **settings: Any) -> Any:
    """Return an object of `named`, the class called `name`, made with copies of `arguments` that are settings.

    Raises UserError if the constructor fails, hangs, or writes to settings.
    """
    copies = [one.model_copy(deep=True) if isinstance(one, BaseModel) else one for one in arguments]
    try:
        made = limited_longer(named, *copies, **settings)
    except Fault as fault:
        raise UserError(kind, name, f"cannot be made: {fault.what.removeprefix('raised ')}") from fault.__cause__
    for copy, stated in zip(copies, arguments, strict=True):
        if isinstance(stated, BaseModel) and (field := _written(copy, stated)):
            raise UserError(kind, name, f"writes to its settings: {field}; settings are the deployment's to state")
    return made


def _written(copy: BaseModel, stated: BaseModel) -> str:
    """Return the first field of `copy` that differs from `stated`, with both values; empty if none does."""
    for name, value in stated:
        now = getattr(copy, name, None)
        if now != value:
            inner = _written(now, value) if isinstance(value, BaseModel) and isinstance(now, BaseModel) else ""
            return f"{name}.{inner}" if inner else f"{name} {shown(now)} instead of {shown(value)}"
    return ""


def _import(place: str) -> ModuleType:
    return _module_in(Path(place)) if place.endswith(".py") else import_module(place)


def _module_name(place: str) -> str:
    """Return the name of the module at `place`; a file gets a name of its own."""
    return f"{_USERS}{blake2b(place.encode(), digest_size=8).hexdigest()}" if place.endswith(".py") else place


def _module_in(file: Path) -> ModuleType:
    """Return the module in `file`, which is loaded once. It can import files in its directory.

    That directory comes last in `sys.path`.
    """
    name = _module_name(str(file))
    if name in sys.modules:
        return sys.modules[name]
    if not file.is_file():
        raise FileNotFoundError(2, "", str(file))
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    spec = spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    before = _LOADING.set(str(file))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        _LOADING.reset(before)
    return module


def loading() -> str:
    """Return the path of the user's file that is being loaded; empty if none is."""
    return _LOADING.get()
