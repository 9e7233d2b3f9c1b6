"""Images, videos and audio of requests as traces store them, and the rules that they keep."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tokentwin.serving.workload import Item

KINDS = ("image", "video", "audio")
_MOST_FRAMES = 1_000_000


def wrong_item(items: Sequence[Item], prompt_len: int) -> str:
    """Return what is wrong with the items of a prompt of `prompt_len` tokens; empty if nothing is."""
    end = 0
    for number, item in enumerate(items):
        if item.tokens < 1 or item.offset < end or item.end > prompt_len:
            return (
                f"item {number} must have tokens after the item before it, and before the prompt ends at {prompt_len}"
            )
        if item.kind not in KINDS:
            return f"item {number} is of kind {item.kind!r}; it must be {', '.join(KINDS[:-1])} or {KINDS[-1]}"
        if not 1 <= item.frames <= _MOST_FRAMES or item.tokens % item.frames:
            return f"item {number} has {item.frames} frames; they must divide its {item.tokens} tokens evenly"
        end = item.end
    return ""


def items_of(given: Iterable[Any]) -> tuple[Item, ...]:
    """Return items from objects with an item's fields. Raises TypeError for other objects, or values of another type.

    `offset` and `tokens` are required.
    """
    items = []
    for one in given:
        item = Item(**one)
        numbers = (item.offset, item.tokens, item.frames)
        if any(type(number) is not int for number in numbers) or not isinstance(item.content, str):
            raise TypeError("offset, tokens and frames are whole numbers, content is text")
        items.append(item)
    return tuple(items)
