"""Token ids for workload segments.

Token j of segment s is a fixed random function of (s, j), so equal segment prefixes give equal tokens, as the
workload promises. A later turn's prompt carries the recorded answer as `out:<id>`; the replay therefore forces
the output of request <id> to that segment's tokens (sampling still runs and is timed).
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from serving.workload import PRIVATE, WorkloadRequest


class SegmentTokens:
    """Tokens from a vocabulary of `vocab_size`."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def prompt(self, request: WorkloadRequest) -> list[int]:
        """Token ids of the whole prompt."""
        tokens: list[int] = []
        for number, (name, count) in enumerate(request.prompt):
            tokens += self._segment(name if name != PRIVATE else f"\0{request.id}.{number}", count)
        return tokens

    def output(self, request: WorkloadRequest) -> list[int]:
        """Token ids that the request's output is forced to."""
        return self._segment(f"out:{request.id}", request.output_len)

    def _segment(self, name: str, count: int) -> list[int]:
        seed = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
        drawn = np.random.default_rng(seed).integers(0, self._vocab_size, count)
        return list(map(int, drawn))
