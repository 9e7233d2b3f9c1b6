"""The time of each output token: the ends of steps by replica, given to requests when their rows are written."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from serving.request import Request
from sim.step_rows import listed


class Sampled(NamedTuple):
    """A request that finished: its last replica, the tokens that its user got on an earlier one, and their time."""

    request: Request
    replica: int
    sampled_before: int
    first_token_ns: int | None


class TokenTimes:
    """The ends of all steps, eight bytes each.

    Attributes:
        pieces: by replica, when its next steps end, in the form that `sim.step_rows.listed` takes
    """

    def __init__(self) -> None:
        self.pieces: dict[int, list[int]] = {}
        self._ends: dict[int, array[int]] = {}

    def of(self, requests: Iterable[Sampled | None]) -> pa.ListArray:
        """Return nanoseconds for each request, null for None."""
        for replica, pieces in self.pieces.items():
            self._ends.setdefault(replica, array("q")).frombytes(listed(pieces).tobytes())
            pieces.clear()
        ends = {replica: np.frombuffer(times, np.int64) for replica, times in self._ends.items()}
        parts, offsets, nothing = [np.zeros(0, np.int64)], [0], []
        for each in requests:
            nothing.append(each is None)
            left = 0
            if each is not None:
                left = each.request.outputs
                if each.sampled_before:
                    parts.append(np.full(min(each.sampled_before, left), each.first_token_ns, np.int64))
                    left -= len(parts[-1])
                for first, count in each.request.sampled_in:
                    if left:
                        parts.append(ends[each.replica][first : first + min(count, left)])
                        left -= len(parts[-1])
                left = each.request.outputs - left
            offsets.append(offsets[-1] + left)
        mask = pa.array(nothing) if any(nothing) else None
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(np.concatenate(parts)), mask=mask)
