"""A link that carries one transfer after another, in the order in which they were requested."""

from __future__ import annotations

from sim.clock import SECOND_NS


class FifoLink:
    """A link that carries one transfer at a time at `bytes_per_s`. Each transfer arrives `latency_ns` later."""

    def __init__(self, bytes_per_s: float, latency_ns: int) -> None:
        self._bytes_per_s = round(bytes_per_s)
        self._latency_ns = latency_ns
        self._free_ns = 0

    def send(self, size: int, ready_ns: int) -> int:
        """Return the time at which `size` bytes that can leave at `ready_ns` arrive.

        The next transfer can begin during the latency of this one.
        """
        begins_ns = max(self._free_ns, ready_ns)
        self._free_ns = begins_ns - (-size * SECOND_NS // self._bytes_per_s)
        return self._free_ns + self._latency_ns
