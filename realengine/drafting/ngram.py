"""Prompt lookup: the continuation of an earlier occurrence of the same words is the draft. It needs no model.

The longest run of a request's last tokens that occurs earlier in its text decides; it has at most `prompt_lookup_max`
and at least `prompt_lookup_min` tokens. The draft is the continuation of the run's first occurrence. These are vLLM's
rules.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from realengine.seating import Seating
from realengine.sequence import TokenSequence
from serving.speculative import SpeculativeConfig
from serving.step_plan import Row


class NgramDrafter:
    """A lookup in the texts of requests; each is indexed as it grows, so a token costs no more in a longer text."""

    runner = None

    def __init__(self, config: SpeculativeConfig) -> None:
        self._most = config.num_speculative_tokens
        self._shortest, self._longest = config.prompt_lookup
        self._texts: dict[int, _Text] = {}

    def draft(
        self, rows: Sequence[Row], going_on: Collection[int], sequences: Mapping[int, TokenSequence], seating: Seating
    ) -> dict[int, list[int]]:
        drafts = {}
        for id in (row.request.id for row in rows if row.request.id in going_on):
            text = self._texts.get(id)
            if text is None:
                text = self._texts[id] = _Text(self._shortest, self._longest)
            if draft := text.continuation(sequences[id].tokens, self._most):
                drafts[id] = draft
        return drafts

    def leave(self, id: int) -> None:
        self._texts.pop(id, None)

    def reset(self) -> None:
        self._texts.clear()


class _Text:
    """The first end of each run of `shortest` to `longest` tokens in one text."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._lengths = range(longest, shortest - 1, -1)
        self._indexed = 0  # ends of runs up to here are indexed

    def continuation(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return at most `most` tokens; none if no run of the last tokens has occurred before."""
        for end in range(self._indexed + 1, len(tokens)):
            for length in self._lengths:
                if length <= end:
                    self._ends.setdefault(tuple(tokens[end - length : end]), end)
        self._indexed = max(self._indexed, len(tokens) - 1)
        for length in self._lengths:
            first_end = self._ends.get(tuple(tokens[-length:]))
            if length < len(tokens) and first_end is not None:
                return list(tokens[first_end : first_end + most])
        return []
