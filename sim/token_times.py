"""The time of each output token: the ends of steps by replica, given to requests when their rows are written."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from serving.request import Request


class Sampled(NamedTuple):
    """A request that finished: its last replica, the tokens that its user got on an earlier one, and their time."""

    request: Request
    replica: int
    sampled_before: int
    first_token_ns: int | None


class TokenTimes:
    """The ends of all steps, eight bytes each.

    Attributes:
        ends_ns: by replica
    """

    def __init__(self) -> None:
        self.ends_ns: dict[int, array[int]] = {}

    def lists(self, samples: Iterable[Sampled | None]) -> pa.ListArray:
        """Return nanoseconds for each request, null for None."""
        ends_ns = {replica: np.frombuffer(ends, np.int64) for replica, ends in self.ends_ns.items()}
        parts, offsets, nothing = [np.zeros(0, np.int64)], [0], []
        for sample in samples:
            nothing.append(sample is None)
            tokens = 0
            if sample is not None:
                left = sample.request.outputs
                if sample.sampled_before:
                    parts.append(np.full(min(sample.sampled_before, left), sample.first_token_ns, np.int64))
                    left -= len(parts[-1])
                for first, count in sample.request.sampled_in:
                    if left:
                        parts.append(ends_ns[sample.replica][first : first + min(count, left)])
                        left -= len(parts[-1])
                tokens = sample.request.outputs - left
            offsets.append(offsets[-1] + tokens)
        mask = pa.array(nothing) if any(nothing) else None
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(np.concatenate(parts)), mask=mask)
