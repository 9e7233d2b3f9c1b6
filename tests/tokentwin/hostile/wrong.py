"""Documents in which one thing is wrong: a value of another type, a meaningless value, or an unknown name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any, NamedTuple

Way = tuple[str | int, ...]

HUGE = 10**30
NUMBERS = ("x", "5", True, [1], {"a": 1}, float("nan"), float("inf"), -HUGE)
WHOLE = (1.5, HUGE)
TRUTHS = ("x", 3, [1], {"a": 1})
TEXTS = (3, True, [1], {"a": 1}, "a\0b")
LISTS = (3, "x", {"a": 1}, [[[]]])
UNBOUNDED = (  # any whole number is one of these
    "seed", "sjf_seed", "max_queued_per_replica", "replica", "long_prefill_token_threshold", "sarathi_token_budget",
    "max_prompt_tokens",
)  # fmt: skip
NOTHING = ([[[]]], {"nothing": 1})  # where null is usual


class Wrong(NamedTuple):
    """A document with one wrong value, and the path to it."""

    way: Way
    value: Any
    document: Any

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.way))} = {self.value!r:.60}"

    @property
    def names(self) -> str:
        """What an error may name, divided by `|`: the field, or what contains it."""
        return "|".join(str(part) for part in self.way[-3:] if isinstance(part, str))


def wrong_documents(document: Any, skipped: Sequence[str] = (), unknown: bool = True) -> Iterator[Wrong]:
    """Yield `document` with one wrong leaf at a time and, if `unknown`, with an unknown name in each mapping."""
    for way, leaf in _leaves(document):
        if any(part in skipped for part in way):
            continue
        for value in _wrong(leaf):
            if way[-1] in UNBOUNDED and isinstance(value, int) and abs(value) == HUGE:
                continue
            yield Wrong(way, value, _with(document, way, value))
    for way in _mappings(document) if unknown else ():
        if not any(part in skipped for part in way):
            yield Wrong((*way, "nosuch"), 1, _with(document, (*way, "nosuch"), 1))


def _wrong(leaf: Any) -> tuple[Any, ...]:
    if leaf is None:
        return NOTHING
    if isinstance(leaf, bool):
        return TRUTHS
    if isinstance(leaf, int):
        return NUMBERS + WHOLE
    if isinstance(leaf, float):
        return NUMBERS
    return TEXTS if isinstance(leaf, str) else LISTS


def _leaves(node: Any, way: Way = ()) -> Iterator[tuple[Way, Any]]:
    if isinstance(node, dict) and node:
        for name, value in node.items():
            yield from _leaves(value, (*way, name))
    elif isinstance(node, list) and node and way:
        yield way, node
        for at, value in enumerate(node):
            yield from _leaves(value, (*way, at))
    else:
        yield way, node


def _mappings(node: Any, way: Way = ()) -> Iterator[Way]:
    children: Any = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    if isinstance(node, dict) and node:
        yield way
    for name, value in children:
        yield from _mappings(value, (*way, name))


def _with(document: Any, way: Way, value: Any) -> Any:
    """Return a copy with `value` at `way`; parts beside the path are shared with `document`."""
    changed = copy(document)
    changed[way[0]] = value if len(way) == 1 else _with(document[way[0]], way[1:], value)
    return changed
