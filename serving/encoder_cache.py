"""The outputs of an encoder that an engine keeps, by content, as vLLM 0.33's encoder cache manager does.

Requests with one content share its output. An output that no request refers to stays until its room is needed; the one
that has been without a request for longest gives way first. Sizes are in embeddings, one for each placeholder token.
"""

from __future__ import annotations

from tokentwin.serving.request import Request
from tokentwin.serving.workload import Item

Content = tuple[str, int]  # what an item shows, and its number of embeddings


def content_of(request: Request, index: int) -> Content:
    """Return the content of item `index` of `request`; an item without one is known by its place in its request."""
    item: Item = request.arrived.items[index]
    return item.content or f"\0{request.id}.{index}", item.tokens


class EncoderCache:
    """Room for `capacity` embeddings."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = capacity
        self._reclaimable = capacity  # free room, and that of outputs without a request
        self._users: dict[Content, set[int]] = {}  # ids of the requests that refer to each output
        self._idle: dict[Content, None] = {}  # outputs without a request, the longest idle first
        self._items: dict[int, set[int]] = {}  # by request id: indices of the items whose outputs it refers to

    def refers(self, request: Request) -> bool:
        """Return whether `request` refers to an output."""
        return request.id in self._items

    def has(self, request: Request, index: int) -> bool:
        """Return whether the output of item `index` of `request` is here."""
        return content_of(request, index) in self._users

    def hit(self, request: Request, index: int) -> bool:
        """Let `request` refer to the output of its item `index`, if it is here; return whether it is."""
        content = content_of(request, index)
        users = self._users.get(content)
        if users is None:
            return False
        if not users:
            del self._idle[content]
            self._reclaimable -= content[1]
        users.add(request.id)
        self._items.setdefault(request.id, set()).add(index)
        return True

    def make_room(self, tokens: int) -> bool:
        """Evict idle outputs until there is room for `tokens` embeddings; do nothing if there cannot be."""
        if tokens > self._reclaimable:
            return False
        while tokens > self._free:
            oldest = next(iter(self._idle))
            del self._idle[oldest], self._users[oldest]
            self._free += oldest[1]
        return True

    def store(self, request: Request, index: int) -> None:
        """Keep the output of item `index` of `request`, for which there is room."""
        content = content_of(request, index)
        self._users.setdefault(content, set()).add(request.id)
        self._items.setdefault(request.id, set()).add(index)
        self._free -= content[1]
        self._reclaimable -= content[1]
        assert self._free >= 0

    def release(self, request: Request, passed: int | None = None) -> None:
        """End the references of `request` to its items before token `passed`; None: to all.

        The order in which a set of small integers is read decides which output is idle for longest. vLLM has the same
        set, so the order is the same, and it does not vary from run to run.
        """
        indices = self._items.get(request.id)
        if indices is None:
            return
        items = request.arrived.items
        for index in list(indices):
            if passed is None or items[index].end <= passed:
                self._let_go(request, index, indices)
        if not indices:
            del self._items[request.id]

    def _let_go(self, request: Request, index: int, indices: set[int]) -> None:
        indices.discard(index)
        content = content_of(request, index)
        users = self._users.get(content)
        if not users or any(content_of(request, other) == content for other in indices):
            return
        users.discard(request.id)
        if not users:
            self._idle[content] = None
            self._reclaimable += content[1]
