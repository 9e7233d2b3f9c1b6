"""Batch sizes that decode rows are padded to.

The engine pads, as CUDA graphs require and CPU kernels like; the cost model must price the same padding.
"""

from __future__ import annotations

from bisect import bisect_left

DECODE_BUCKETS = (1, 2, 4, *range(8, 1025, 8))


def padded(rows: int) -> int:
    """The smallest bucket that holds `rows` decode rows; 0 for none."""
    return DECODE_BUCKETS[bisect_left(DECODE_BUCKETS, rows)] if 0 < rows <= DECODE_BUCKETS[-1] else rows
