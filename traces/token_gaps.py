"""The gaps between the tokens of each request, without a Python loop over either."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from traces.numeric_columns import Floats


def gaps_ms(times: pa.ChunkedArray) -> Floats:
    """Milliseconds between consecutive entries of each list of `times`, in nanoseconds, pooled in order."""
    gaps = [np.empty(0)]
    for chunk in times.chunks:
        flat = chunk.flatten().to_numpy(zero_copy_only=False)
        ends = np.cumsum(chunk.value_lengths().to_numpy(zero_copy_only=False))[:-1]
        gap = np.diff(flat)
        inside = np.ones(len(gap), dtype=bool)
        inside[ends[(ends > 0) & (ends < len(flat))] - 1] = False
        gaps.append(gap[inside] / 1e6)
    return np.concatenate(gaps)
