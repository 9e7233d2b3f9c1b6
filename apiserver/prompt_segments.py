"""The conversion of prompts of token ids to prompts of a workload."""

from __future__ import annotations

from collections.abc import Sequence

from apiserver.messages import Add
from serving.workload import WorkloadRequest
from traces.shared_prefixes import Path, SharedPrefixes


class Answer:
    """The answer to a request, so far."""

    def __init__(self, asked: Add, arrived: WorkloadRequest) -> None:
        self.asked = asked
        self.arrived = arrived
        self.tokens: list[int] = []


class PromptSegments:
    """A converter from token ids to prompt segments, by blocks of `block_size` tokens."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._prefixes = SharedPrefixes(block_size)

    def segments(self, id: int, tokens: Sequence[int]) -> Path:
        """Return the segments of a prompt of request `id`; equal beginnings of whole blocks have equal names."""
        return self._prefixes.prompt(id, self._keys(tokens), len(tokens))

    def request(
        self, id: int, at_ns: int, asked: Add, length: int | None = None, slo_class: str = ""
    ) -> WorkloadRequest:
        """Return the request as a workload has it; `length` is the length of its answer, by default `max_tokens`."""
        return WorkloadRequest(
            id,
            at_ns,
            self.segments(id, asked.prompt),
            asked.max_tokens if length is None else length,
            asked.priority,
            asked.tenant,
            slo_class,
            asked.session,
            structured=bool(asked.grammar),
        )

    def answered(self, answer: Answer) -> None:
        """Note that `answer` is complete."""
        tokens, arrived = [*answer.asked.prompt, *answer.tokens], answer.arrived
        self._prefixes.answered(arrived.id, arrived.prompt, self._keys(tokens), len(tokens))

    def _keys(self, tokens: Sequence[int]) -> list[int]:
        """Return for every whole block a hash of all tokens up to its end.

        The hash is equal on every machine, because Python's hashes of tuples of integers are.
        """
        size, key, keys = self._block_size, 0, []
        for begin in range(0, len(tokens) - size + 1, size):
            key = hash((key, *tokens[begin : begin + size]))
            keys.append(key)
        return keys
