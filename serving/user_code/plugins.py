"""Finding a policy, a router, a cost model or an attention backend by its name.

Built-in ones are found by name, installed ones by the name of their entry point, and a user's own as
`path/to/file.py:Class` or `module:Class`. The entry points of policies are in the group `tokentwin.policy`; the groups
of the other kinds are named in the same way. Paths are relative to the working directory. Modules that Python finds
nowhere else are looked for there, too. `located` makes such a name absolute when it is read, so that a job or a worker
that runs in another directory finds the same file.

A user's policy or router must not replace functions of tokentwin. All functions are checked when a user's file is
imported; the functions of the simulator and of cost models are also checked in each run. Other changes that a user's
code makes to our objects are not detected, because it runs in the same process.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from hashlib import blake2b
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from threading import Thread
from types import FrameType, FunctionType, ModuleType
from typing import Any

from tokentwin.serving.errors import OURS, UserError
from tokentwin.serving.user_code.call_limit import Fault, limited_longer

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
    ours = our_functions() if name not in known and _module_name(place) not in sys.modules else {}
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
            remedy = f"the module {error.name!r} cannot be imported; give its file, as in path/to/file.py:{class_name}"
        else:
            remedy = f"cannot be imported: {fault.what.removeprefix('raised ')}"
        raise UserError(kind, name, remedy) from None
    if replaces := replaced(ours):
        raise UserError(
            kind, name, f"replaces {replaces}, which is tokentwin's, when it is imported; leave it as it is"
        )
    if user_threads():
        end_user_threads()
        raise UserError(kind, name, "starts a thread when it is imported, which does not end; start none, or a daemon")
    if not there:
        raise UserError(kind, name, f"{'file' if place.endswith('.py') else 'module'} {place} has no {class_name}")
    return getattr(module, class_name)


def make(kind: str, name: str, named: Any, *arguments: Any, **settings: Any) -> Any:
    """Return an object of `named`, the class called `name`. Raises UserError if its constructor fails or hangs."""
    try:
        return limited_longer(named, *arguments, **settings)
    except Fault as fault:
        raise UserError(kind, name, f"cannot be made: {fault.what.removeprefix('raised ')}") from fault.__cause__


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


def user_threads() -> list[Thread]:
    """Return the threads that run code of a user's file and that Python would wait for at exit."""
    frames = sys._current_frames()
    others = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    return [thread for thread in others if not thread.daemon and _runs_users(frames.get(thread.ident or 0))]


def _runs_users(frame: FrameType | None) -> bool:
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_USERS):
            return True
        frame = frame.f_back
    return False


def end_user_threads() -> bool:
    """End the threads of `user_threads`; return whether all have ended. A thread inside C code cannot be ended."""
    threads = user_threads()
    for thread in threads:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
    for thread in threads:
        thread.join(1.0)
    return not any(thread.is_alive() for thread in threads)


def loading() -> str:
    """Return the path of the user's file that is being loaded; empty if none is."""
    return _LOADING.get()


class Replaced(UserError):
    """The error for user's code, called `names`, that has replaced our function `what`."""

    def __init__(self, names: str, what: str) -> None:
        super().__init__("policy or router", names, f"replaces {what}, which is tokentwin's; leave it as it is")


Functions = dict[tuple[Any, str], object]
"""Functions by their owner (a class or a module) and their name in it."""


def our_functions() -> Functions:
    """Return the functions of all our imported modules and of their classes."""
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in OURS]
    return dict(_functions([*modules, *(one for module in modules for one in vars(module).values() if _is_ours(one))]))


def functions_of(objects: Iterable[object]) -> Functions:
    """Return the functions of the classes of `objects` and of their attributes, down to attributes of attributes."""
    kinds: dict[type, None] = {}
    objects = list(objects)
    for _ in range(3):
        kinds.update((kind, None) for one in objects for kind in type(one).__mro__ if _is_ours(kind))
        objects = [value for one in objects if _is_ours(type(one)) for value in getattr(one, "__dict__", {}).values()]
    return dict(_functions(kinds))


def replaced(before: Functions) -> str:
    """Return the name of a function that has been replaced since `before`; empty if there is none."""
    for (owner, name), does in before.items():
        if _does(vars(owner).get(name)) is not does:
            return (
                f"{owner.__module__}.{owner.__name__}.{name}" if isinstance(owner, type) else f"{owner.__name__}.{name}"
            )
    return ""


def _is_ours(value: object) -> bool:
    return isinstance(value, type) and str(value.__module__).partition(".")[0] in OURS


def _functions(owners: Iterable[Any]) -> Iterator[tuple[tuple[Any, str], object]]:
    for owner in owners:
        if "_is_protocol" not in vars(owner):  # Python itself changes the methods of protocols
            for name, value in list(vars(owner).items()):
                if (does := _does(value)) is not None:
                    yield (owner, name), does


def _does(value: Any) -> object:
    kind = type(value)
    if kind is property:
        value = value.fget
    elif kind is staticmethod or kind is classmethod:
        value = value.__func__
    return value.__code__ if type(value) is FunctionType else None
