"""The wait of requests for others to join them, under a policy that lets a batch wait to be full."""

from __future__ import annotations


class Hold:
    """The time since which requests wait so that others may join them."""

    def __init__(self) -> None:
        self._since_ns: int | None = None

    @property
    def waits(self) -> bool:
        """True if any request waits."""
        return self._since_ns is not None

    def is_over(self, now_ns: int, hold_ns: int) -> bool:
        """Return whether requests have waited for `hold_ns`, which is 0 when none do."""
        if not hold_ns:
            self._since_ns = None
            return False
        if self._since_ns is None:
            self._since_ns = now_ns
        return now_ns - self._since_ns >= hold_ns
