"""The network adapters of an engine on several nodes, which its collectives share with KV transfers.

In each layer, collectives and transfers share an adapter fairly: beside k transfers a collective gets 1 / (k + 1) of
it, so its time on the link grows by the factor k + 1. The transfers share the rest of the link; the bytes that the
step's collectives send are spread evenly over the step. Only the transfers that are present when a step is launched
make it longer.
"""

from __future__ import annotations

from serving.cost_model import NetworkedCost
from sim.links import Links


class SharedNetwork:
    """The adapters of the replica with this `index` in `links`. `cost` gives the times of its collectives."""

    def __init__(self, links: Links, index: int, cost: NetworkedCost) -> None:
        self._links = links
        self._index = index
        self._cost = cost

    def wait_ns(self, tokens: int, step_ns: int) -> int:
        """Return the time that transfers add to a step of `tokens` tokens launched now, which alone takes `step_ns`."""
        alone_ns = min(self._cost.network_ns(tokens), step_ns)
        more_ns = alone_ns * self._links.flows(self._index)
        self._links.take(self._index, alone_ns, max(step_ns + more_ns, 1))
        return more_ns

    def rest(self) -> None:
        """Leave the whole link to transfers, because no step is in flight."""
        self._links.take(self._index, 0, 1)
