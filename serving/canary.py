"""The canary: a fixed reference step that shows whether a machine was calm, whatever the engine did on it."""

from __future__ import annotations

CANARY_ROWS = (1,) * 4
CALM_DRIFT = 0.05  # share of the canary's time: if canaries differ by more, the machine was not calm


def canary_rows(max_num_seqs: int) -> tuple[int, ...]:
    """Return the tokens of each row of the canary, on an engine that runs at most `max_num_seqs` requests."""
    return CANARY_ROWS[:max_num_seqs]
