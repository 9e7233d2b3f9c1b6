"""Prompt lookup: what followed the same words before is proposed again. It needs no model.

Of the last tokens of a request, the longest run that occurs in its text before, of at most `prompt_lookup_max` and at
least `prompt_lookup_min` tokens, decides: what follows its first occurrence is the draft. These are vLLM's rules.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from realengine.seating import Seating
from realengine.sequence import TokenSequence
from serving.speculative import SpeculativeConfig
from serving.step_plan import Row


class NgramDrafter:
    """Looks up the texts of requests, each of which is indexed as it grows: a token costs no more in a longer one."""

    runner = None

    def __init__(self, config: SpeculativeConfig) -> None:
        self._most = config.num_speculative_tokens
        self._shortest, self._longest = config.prompt_lookup
        self._texts: dict[int, _Text] = {}

    def draft(
        self, rows: Sequence[Row], going_on: Collection[int], sequences: Mapping[int, TokenSequence], seating: Seating
    ) -> dict[int, list[int]]:
        found = {}
        for id in (row.request.id for row in rows if row.request.id in going_on):
            text = self._texts.get(id)
            if text is None:
                text = self._texts[id] = _Text(self._shortest, self._longest)
            if draft := text.continuation(sequences[id].tokens, self._most):
                found[id] = draft
        return found

    def leave(self, id: int) -> None:
        self._texts.pop(id, None)

    def reset(self) -> None:
        self._texts.clear()


class _Text:
    """Where each run of `shortest` to `longest` tokens of one text ends first."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._lengths = range(longest, shortest - 1, -1)
        self._indexed = 0  # ends of runs up to here are known

    def continuation(self, tokens: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens; none if no run of the last tokens has occurred before."""
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
