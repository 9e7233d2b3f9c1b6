"""The conversion of prompts from token ids to the segments of a workload."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from tokentwin.apiserver.messages import Add
from tokentwin.serving.workload import WorkloadRequest
from tokentwin.traces.shared_prefixes import Path, SharedPrefixes


class Answer:
    """The answer to a request: its tokens so far."""

    def __init__(self, asked: Add, arrived: WorkloadRequest) -> None:
        self.asked = asked
        self.arrived = arrived
        self.tokens: list[int] = []


class PromptSegments:
    """A converter from token ids to prompt segments, by blocks of `block_size` tokens."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._prefixes = SharedPrefixes(block_size)

    def segments(self, id: int, tokens: Sequence[int], salt: str = "") -> Path:
        """Return the segments of the prompt of request `id`; those with one salt share the equal leading blocks."""
        return self._prefixes.prompt(id, self._keys(tokens, salt), len(tokens))

    def request(
        self, id: int, at_ns: int, asked: Add, length: int | None = None, slo_class: str = ""
    ) -> WorkloadRequest:
        """Return the request in the form of a workload; `length` is the answer's length, by default `max_tokens`."""
        return WorkloadRequest(
            id,
            at_ns,
            self.segments(id, asked.prompt, asked.cache_salt),
            asked.max_tokens if length is None else length,
            asked.priority,
            asked.tenant,
            slo_class,
            asked.session,
            structured=bool(asked.grammar),
            skip_reading_prefix_cache=asked.prompt_logprobs is not None,
            adapter=asked.adapter,
            changes_logits=asked.rules is not None and asked.rules.change_most,
            scores_prompt=asked.prompt_logprobs is not None,
        )

    def answered(self, answer: Answer) -> None:
        """Note that `answer` is complete."""
        tokens, arrived = [*answer.asked.prompt, *answer.tokens], answer.arrived
        self._prefixes.answered(arrived.id, arrived.prompt, self._keys(tokens, answer.asked.cache_salt), len(tokens))

    def _keys(self, tokens: Sequence[int], salt: str) -> list[int]:
        """Return, for every whole block, a hash of the salt and all tokens up to its end.

        It is the same on every machine, because Python's hash of a tuple of integers is.
        """
        size, keys = self._block_size, []
        key = int.from_bytes(blake2b(salt.encode(), digest_size=7).digest()) if salt else 0
        for begin in range(0, len(tokens) - size + 1, size):
            key = hash((key, *tokens[begin : begin + size]))
            keys.append(key)
        return keys
