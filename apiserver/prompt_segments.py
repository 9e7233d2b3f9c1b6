"""Names for what prompts share, so that prompts of tokens become prompts of a workload.

Prefix caches know whole blocks by everything before them, so equal beginnings are looked for block by block. What was
not seen before gets a name of its own; an answer is `out:ID`, so that the next turn of a conversation may quote it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from apiserver.messages import Add
from serving.workload import Segment, WorkloadRequest

_MOST_BLOCKS = 1 << 18  # remembered at once, in some 100 MB; the one least recently seen goes first

_Path = tuple[Segment, ...]


class Answer:
    """The answer to a request, so far."""

    def __init__(self, asked: Add, arrived: WorkloadRequest) -> None:
        self.asked = asked
        self.arrived = arrived
        self.tokens: list[int] = []


class PromptSegments:
    """Turns token ids into segments, by blocks of `block_size` tokens."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._paths: OrderedDict[int, _Path] = OrderedDict()  # by a hash of every token up to a block's end

    def of(self, id: int, tokens: Sequence[int]) -> _Path:
        """The segments of a prompt of request `id`; equal beginnings of whole blocks have equal names."""
        known, keys = 0, self._keys(tokens)
        path: _Path = ()
        for key in keys:
            if (found := self._paths.get(key)) is None:
                break
            known, path = known + self._block_size, found
        for key in reversed(keys[: known // self._block_size]):  # what others build on goes last
            self._paths.move_to_end(key)
        if known < len(tokens):
            self._remember(keys, known, path, f"p{id}", len(tokens))
            path = (*path, (f"p{id}", len(tokens) - known))
        return path

    def request(
        self, id: int, at_ns: int, asked: Add, length: int | None = None, slo_class: str = ""
    ) -> WorkloadRequest:
        """What was asked for, as a workload has it; `length` is that of its answer, where it is not the most."""
        return WorkloadRequest(
            id,
            at_ns,
            self.of(id, asked.prompt),
            asked.max_tokens if length is None else length,
            asked.priority,
            asked.tenant,
            slo_class,
            asked.session,
            structured=bool(asked.grammar),
        )

    def answered(self, answer: Answer) -> None:
        """There will be no more of `answer`."""
        tokens, arrived = [*answer.asked.prompt, *answer.tokens], answer.arrived
        self._remember(self._keys(tokens), arrived.prompt_len, arrived.prompt, f"out:{arrived.id}", len(tokens))

    def _remember(self, keys: Sequence[int], begins: int, path: _Path, name: str, ends: int) -> None:
        """Blocks that end within the segment `name`, which goes from token `begins` to `ends`."""
        for at in reversed(range(begins // self._block_size, ends // self._block_size)):
            end = (at + 1) * self._block_size
            if end > begins:
                self._paths.setdefault(keys[at], (*path, (name, end - begins)))
        while len(self._paths) > _MOST_BLOCKS:
            self._paths.popitem(last=False)

    def _keys(self, tokens: Sequence[int]) -> list[int]:
        """Of every whole block, a hash of all tokens up to its end. Equal on every machine: tuples of integers are."""
        size, key, keys = self._block_size, 0, []
        for begin in range(0, len(tokens) - size + 1, size):
            key = hash((key, *tokens[begin : begin + size]))
            keys.append(key)
        return keys
