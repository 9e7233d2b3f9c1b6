"""Token ids for workload segments.

Token j of segment s is a fixed random function of (s, j), so equal segment prefixes give equal tokens, as the workload
promises. A later turn's prompt has the recorded answer as `out:<id>`. So the replay forces the output of request <id>
to that segment's tokens (sampling still runs and is timed). If it cannot, it notes the output, and later turns quote
that.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from serving.workload import PRIVATE, Segment, WorkloadRequest

_OUT = "out:"


def quotes(prompt: tuple[Segment, ...]) -> bool:
    """Return whether the prompt has a part of another request's output."""
    return any(name.startswith(_OUT) for name, _ in prompt)


def named_segments(request: WorkloadRequest) -> list[Segment]:
    """Return the segments of a prompt, private ones under names that no other segment has."""
    return [
        (name if name != PRIVATE else f"\0{request.id}.{number}", count)
        for number, (name, count) in enumerate(request.prompt)
    ]


class SegmentTokens:
    """Tokens from a vocabulary of `vocab_size`, from token `first` on: vocabularies often begin with special ones.

    Another `salt` makes other tokens of the same segments.
    """

    def __init__(self, vocab_size: int, first: int = 0, salt: str = "") -> None:
        self._vocab_size = vocab_size
        self._first = first
        self._salt = salt
        self._outputs: dict[str, list[int]] = {}

    def prompt(self, request: WorkloadRequest) -> list[int]:
        """Return the token ids of the whole prompt."""
        tokens: list[int] = []
        for name, count in named_segments(request):
            tokens += self.segment(name, count)
        return tokens

    def output(self, request: WorkloadRequest) -> list[int]:
        """Return the token ids that the request's output is forced to."""
        return self.segment(f"{_OUT}{request.id}", request.output_len)

    def note_output(self, id: int, tokens: list[int]) -> None:
        """Note that the output of request `id` was not forced, and began with `tokens`."""
        self._outputs[f"{_OUT}{id}"] = tokens

    def quotable(self, prompt: tuple[Segment, ...]) -> tuple[Segment, ...]:
        """Return `prompt`, with other names for outputs that were not noted yet."""
        return tuple(
            (f"unsaid:{name}" if name.startswith(_OUT) and name not in self._outputs else name, count)
            for name, count in prompt
        )

    def segment(self, name: str, count: int) -> list[int]:
        """Return the first `count` tokens of a segment."""
        seed = int.from_bytes(blake2b(f"{self._salt}{name}".encode(), digest_size=8).digest(), "little")
        drawn = np.random.default_rng(seed).integers(self._first, self._vocab_size, count)
        noted = self._outputs.get(name, [])[:count]
        return noted + list(map(int, drawn[len(noted) :]))
