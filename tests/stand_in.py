"""A stand-in for an object that replaces some of its methods, which an object of a compiled class does not allow."""

from typing import Any


class StandIn:
    def __init__(self, of: Any, **calls: Any) -> None:
        self._of = of
        vars(self).update(calls)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)
