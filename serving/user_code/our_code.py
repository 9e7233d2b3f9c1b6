"""The functions of tokentwin as they are now: a user's policy or router may replace none of them.

All functions are checked when a user's file is imported, and in each run the functions that simulate and price. Other
changes that a user's code makes to objects that are not its own go unseen: it runs in the same process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any

from serving.errors import OURS, UserError


class Replaced(UserError):
    """The user's code called `names` has put something else in the place of `what`."""

    def __init__(self, names: str, what: str) -> None:
        super().__init__("policy or router", names, f"replaces {what}, which is tokentwin's; leave it as it is")


Functions = dict[tuple[Any, str], object]
"""What each does, by the class or module that has it and its name there."""


def our_functions() -> Functions:
    """Return the functions of all imported modules."""
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in OURS]
    return dict(_functions([*modules, *(one for module in modules for one in vars(module).values() if _is_ours(one))]))


def functions_of(objects: Iterable[object]) -> Functions:
    """Return the functions of the classes of `objects`, of their attributes, and of the attributes of these."""
    kinds: dict[type, None] = {}
    objects = list(objects)
    for _ in range(3):
        kinds.update((kind, None) for one in objects for kind in type(one).__mro__ if _is_ours(kind))
        objects = [value for one in objects if _is_ours(type(one)) for value in getattr(one, "__dict__", {}).values()]
    return dict(_functions(kinds))


def replaced(before: Functions) -> str:
    """Return the name of a function that has changed since `before`; empty if none has."""
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
