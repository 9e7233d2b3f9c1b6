"""The adapters of an engine on several nodes, which its collectives share with KV transfers.

Layer by layer collectives and transfers take turns on an adapter, fairly: beside k transfers a collective has one part
in k + 1 of it, so that what it needs of the link takes k + 1 times as long. Meanwhile the transfers share what is left:
all of the link but the bytes that the step's collectives send, spread evenly over the step. A step is stretched by the
transfers that are under way when it is launched.
"""

from __future__ import annotations

from serving.cost_model import NetworkedCost
from sim.links import Links


class SharedNetwork:
    """The adapters of one replica, by its `index` in `links`; `cost` tells what its collectives need of them."""

    def __init__(self, links: Links, index: int, cost: NetworkedCost) -> None:
        self._links = links
        self._index = index
        self._cost = cost

    def wait_ns(self, tokens: int, step_ns: int) -> int:
        """How much longer a step of so many tokens takes that is launched now, and would take `step_ns` alone."""
        alone_ns = min(self._cost.network_ns(tokens), step_ns)
        more_ns = alone_ns * self._links.flows(self._index)
        self._links.take(self._index, alone_ns, max(step_ns + more_ns, 1))
        return more_ns

    def rest(self) -> None:
        """No step is under way."""
        self._links.take(self._index, 0, 1)
