"""The canary: a fixed reference step that tells whether a machine was calm, whatever the engine did on it."""

from __future__ import annotations

CANARY_ROWS = (1,) * 4
CALM_DRIFT = 0.05  # of its time: more apart than this, and the machine was not calm


def canary_rows(max_num_seqs: int) -> tuple[int, ...]:
    """Tokens of each row of it, on an engine that runs at most so many requests."""
    return CANARY_ROWS[:max_num_seqs]
