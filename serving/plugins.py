"""Finding a policy, a router or a cost model by name; `package.module:Class` finds a user's own."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from serving.errors import UserError


def find(kind: str, name: str, known: dict[str, str], needs: tuple[str, ...]) -> Any:
    """The class called `name`: one of `known` (name -> `module:Class`), or itself a `module:Class`.

    Raises UserError when there is no such name, module or class, or the class lacks a method that it `needs`.
    """
    target = known.get(name, name)
    module_name, colon, class_name = target.partition(":")
    if not colon or not module_name or not class_name:
        raise UserError(kind, name, f"is none of {', '.join(known)}; your own is package.module:Class")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(kind, name, f"no module {error.name!r} can be imported; is it on PYTHONPATH?") from None
    except Exception as error:  # a user's module may fail in any way
        raise UserError(kind, name, f"cannot be imported: {error!r}") from None
    if not hasattr(module, class_name):
        raise UserError(kind, name, f"module {module_name} has no class {class_name}")
    found = getattr(module, class_name)
    missing = [method for method in needs if not callable(getattr(found, method, None))]
    if not isinstance(found, type) or missing:
        raise UserError(kind, name, f"is not a class with {', '.join(needs)}")
    return found


def make(kind: str, name: str, found: Any, *arguments: Any, **settings: Any) -> Any:
    """An object of the user's own class `found`. Raises UserError when its constructor fails in any way."""
    try:
        return found(*arguments, **settings)
    except UserError:
        raise
    except Exception as error:
        raise UserError(kind, name, f"cannot be made: {error!r}") from error
