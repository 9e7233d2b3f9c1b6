"""Names for what prompts share, so that prompts of tokens become prompts of a workload.

Prefix caches know whole blocks by everything before them, so equal beginnings are looked for block by block. What was
not seen before gets a name of its own; an answer is `out:ID`, so that the next turn of a conversation may quote it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from serving.workload import Segment

Path = tuple[Segment, ...]

_MOST_BLOCKS = 1 << 18  # remembered at once, in some 100 MB; the one least recently seen goes first


class SharedPrefixes:
    """Segments of prompts, by a key of each whole block of `block_size` tokens.

    A key stands for all tokens up to the end of its block, and `ahead` more: equal ones are equal beginnings. What has
    no keys shares nothing. Of all blocks seen, the last `most_blocks` are remembered.

    ambiguous  blocks of answers that were seen before the answer ended: another answer says the same, or a prompt that
               came meanwhile quotes it. They have two names, so that a simulation can find fewer prefixes
    """

    def __init__(self, block_size: int, most_blocks: int = _MOST_BLOCKS, ahead: int = 0) -> None:
        self._block_size = block_size
        self._most_blocks = most_blocks
        self._ahead = ahead
        self._paths: OrderedDict[Hashable, Path] = OrderedDict()
        self.ambiguous = 0

    def prompt(self, id: int, keys: Sequence[Hashable], length: int) -> Path:
        """The segments of a prompt of `length` tokens of request `id`; equal beginnings have equal names."""
        known = blocks = 0
        path: Path = ()
        for key in keys:
            if (found := self._paths.get(key)) is None:
                break
            path = found
            known, blocks = self._end(blocks), blocks + 1
        for key in reversed(keys[:blocks]):  # what others build on goes last
            self._paths.move_to_end(key)
        if known < length:
            self._remember(keys, known, path, f"p{id}", length)
            path = (*path, (f"p{id}", length - known))
        return path

    def answered(self, id: int, prompt: Path, keys: Sequence[Hashable], length: int) -> None:
        """There will be no more of the answer to request `id`: it and its `prompt` are `length` tokens."""
        begins = sum(tokens for _, tokens in prompt)
        self.ambiguous += sum(key in self._paths for at, key in enumerate(keys) if self._end(at) > begins)
        self._remember(keys, begins, prompt, f"out:{id}", length)

    def _end(self, block: int) -> int:
        """Up to which token the key of a block stands."""
        return (block + 1) * self._block_size + self._ahead

    def _remember(self, keys: Sequence[Hashable], begins: int, path: Path, name: str, ends: int) -> None:
        """Blocks of which keys end within the segment `name`, which goes from token `begins` to `ends`."""
        first = max(begins - self._ahead, 0) // self._block_size
        for at in reversed(range(first, min(ends // self._block_size, len(keys)))):
            if begins < (end := self._end(at)) <= ends:
                self._paths.setdefault(keys[at], (*path, (name, end - begins)))
        while len(self._paths) > self._most_blocks:
            self._paths.popitem(last=False)
