"""Sizes that steps are padded to: decode rows to a batch size, tokens of mixed steps that run as CUDA graphs.

The engine pads, as CUDA graphs require and CPU kernels like; the cost model must price the same padding.
"""

from __future__ import annotations

from bisect import bisect_left

DECODE_BUCKETS = (1, 2, 4, *range(8, 1025, 8))
TOKEN_BUCKETS = (16, 32, 64, 128, *(step * (1 << power) for power in range(5, 9) for step in (5, 6, 8)))


def padded(rows: int) -> int:
    """Return the smallest bucket that holds `rows` decode rows; 0 for no rows."""
    return DECODE_BUCKETS[bisect_left(DECODE_BUCKETS, rows)] if 0 < rows <= DECODE_BUCKETS[-1] else rows


def padded_tokens(tokens: int) -> int:
    """Return the tokens of the CUDA graph that holds a mixed step of `tokens` tokens.

    Larger steps keep their size, because they run eagerly.
    """
    return TOKEN_BUCKETS[bisect_left(TOKEN_BUCKETS, tokens)] if tokens <= TOKEN_BUCKETS[-1] else tokens
