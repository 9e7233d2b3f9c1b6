"""Names for the parts that prompts share, which turn prompts of tokens into prompts of a workload.

A prefix cache identifies a block by all tokens up to its end, so prefixes are compared block by block. Tokens that were
not seen before get a new name. An answer is named `out:ID`, so that the next turn of a conversation can refer to it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from tokentwin.serving.workload import Segment

Path = tuple[Segment, ...]

_MOST_BLOCKS = 1 << 18  # maximum number of remembered blocks (100 MB); the least recently seen one is dropped first


class SharedPrefixes:
    """Segments of prompts, by a key of each whole block of `block_size` tokens.

    A key stands for all tokens up to the end of its block and `extra_tokens` more, so equal keys mean equal prefixes.
    Tokens without keys share nothing. The `most_blocks` most recently seen blocks are remembered.

    Attributes:
        ambiguous: number of blocks of answers that were already known when the answer ended, from an equal answer or
            from a prompt that quoted it earlier. They have two names, so a simulation may find fewer shared prefixes
    """

    def __init__(self, block_size: int, most_blocks: int = _MOST_BLOCKS, extra_tokens: int = 0) -> None:
        self._block_size = block_size
        self._most_blocks = most_blocks
        self._extra_tokens = extra_tokens
        self._paths: OrderedDict[Hashable, Path] = OrderedDict()
        self.ambiguous = 0

    def prompt(self, id: int, keys: Sequence[Hashable], length: int) -> Path:
        """Return the segments of request `id`'s prompt of `length` tokens; equal prefixes have equal segments."""
        blocks = 0
        path: Path = ()
        for key in keys:
            if (known_path := self._paths.get(key)) is None:
                break
            path = known_path
            blocks += 1
        # from the last block to the first, so that blocks at the begin of prefixes are dropped last
        for key in reversed(keys[:blocks]):
            self._paths.move_to_end(key)
        return self.extended(id, path, keys, length)

    def extended(self, id: int, path: Path, keys: Sequence[Hashable], length: int) -> Path:
        """Return `path` with new tokens of request `id` up to `length` tokens."""
        known = sum(tokens for _, tokens in path)
        if known < length:
            self._remember(keys, known, path, f"p{id}", length)
            path = (*path, (f"p{id}", length - known))
        return path

    def answered(self, id: int, prompt: Path, keys: Sequence[Hashable], length: int) -> None:
        """Remember the complete answer to request `id`; `prompt` and answer together have `length` tokens."""
        begins = sum(tokens for _, tokens in prompt)
        self.ambiguous += sum(key in self._paths for at, key in enumerate(keys) if self._end(at) > begins)
        self._remember(keys, begins, prompt, f"out:{id}", length)

    def _end(self, block: int) -> int:
        """Return the number of tokens that the key of a block stands for."""
        return (block + 1) * self._block_size + self._extra_tokens

    def _remember(self, keys: Sequence[Hashable], begins: int, path: Path, name: str, ends: int) -> None:
        """Remember the blocks with keys that end within segment `name`, which spans tokens `begins` to `ends`."""
        first = max(begins - self._extra_tokens, 0) // self._block_size
        for at in reversed(range(first, min(ends // self._block_size, len(keys)))):
            if begins < (end := self._end(at)) <= ends:
                self._paths.setdefault(keys[at], (*path, (name, end - begins)))
        while len(self._paths) > self._most_blocks:
            self._paths.popitem(last=False)
