"""The adapters of an engine on several nodes, which its collectives share with KV transfers.

Layer by layer collectives and transfers take turns on an adapter, fairly: beside k transfers a collective has one part
in k + 1 of it, so that its time on the link grows by the factor k + 1. Meanwhile the transfers share the rest: all of
the link but the bytes that the step's collectives send, spread evenly over the step. A step is stretched by the
transfers that are under way when it is launched.
"""

from __future__ import annotations

from serving.cost_model import NetworkedCost
from sim.links import Links


class SharedNetwork:
    """The adapters of one replica, by its `index` in `links`; `cost` knows the needs of its collectives."""

    def __init__(self, links: Links, index: int, cost: NetworkedCost) -> None:
        self._links = links
        self._index = index
        self._cost = cost

    def wait_ns(self, tokens: int, step_ns: int) -> int:
        """Return how much longer a step of `tokens` tokens takes that is launched now, and takes `step_ns` alone."""
        alone_ns = min(self._cost.network_ns(tokens), step_ns)
        more_ns = alone_ns * self._links.flows(self._index)
        self._links.take(self._index, alone_ns, max(step_ns + more_ns, 1))
        return more_ns

    def rest(self) -> None:
        """Leave the whole link to transfers: no step is under way."""
        self._links.take(self._index, 0, 1)
