"""The links between replicas, which transfers share by max-min fairness.

Every replica has one port for sending and one for receiving, and all replicas may share one fabric. Whenever a flow
starts or ends, the rates of all flows that share a port with it, directly or through other flows, are computed anew:
all rates rise together, and a flow stops rising when one of its ports is full (progressive filling: Bertsekas and
Gallager, Data Networks, 6.5.2). Rates and bytes are integers of a very small unit, so that equal flows end at the same
nanosecond on every machine.

The collectives of an engine on several nodes may share its network adapters with KV transfers, fairly in each layer:
during k transfers a collective gets 1 / (k + 1) of an adapter, so its time on the link is k + 1 times as long. The
transfers share the rest of the link; the bytes that the step's collectives send are spread evenly over the step. Only
the transfers that are present when a step is launched make it longer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from simpy import Interrupt, Process
from simpy.events import ProcessGenerator

from tokentwin.serving.cost_model import NetworkedCost
from tokentwin.sim.clock import SECOND_NS, TRANSFER_ENDS, VirtualClock

_FINE = 1_000_000  # rates are in millionths of a byte per second; shares are rounded down to this unit


class Port:
    """One direction of a link, and the flows that go through it. `capacity` is 0 while the link is lost."""

    __slots__ = ("capacity", "flows")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.flows: dict[Flow, None] = {}


class Flow:
    """One transfer. Since `since_ns`, each nanosecond reduces `left` by `rate`."""

    __slots__ = ("cancelled", "left", "ports", "process", "rate", "since_ns", "size")

    def __init__(self, size: int, ports: tuple[Port, ...]) -> None:
        self.size = self.left = size
        self.ports = ports
        self.rate = 0
        self.since_ns = 0
        self.cancelled = False
        self.process: Process | None = None

    @property
    def ends_ns(self) -> int:
        """The time at which all its bytes will have arrived at its present rate."""
        return self.since_ns - (-self.left // self.rate)


class Links:
    """The links of all replicas, by the index of the replica.

    Args:
        latency_ns: time before a transfer begins
        nic_bytes_s: maximum rate at which a replica sends, and maximum rate at which it receives, in bytes/s
        fabric_bytes_s: maximum rate of all transfers together, in bytes/s; None for no limit
    """

    def __init__(
        self, clock: VirtualClock, latency_ns: int, nic_bytes_s: float, fabric_bytes_s: float | None = None
    ) -> None:
        self._clock = clock
        self._latency_ns = latency_ns
        self._nic = round(nic_bytes_s * _FINE)
        self._fabric = () if fabric_bytes_s is None else (Port(round(fabric_bytes_s * _FINE)),)
        self._ports: dict[int, tuple[Port, Port]] = {}  # (sending port, receiving port)
        self._losses: Counter[int] = Counter()  # number of present losses of each link
        self._taken: dict[int, tuple[int, int]] = {}  # fraction of each link that other traffic takes

    def start(self, source: int, destination: int, size: int, on_end: Callable[[], None]) -> Flow:
        """Send `size` bytes, beginning after the latency. `on_end` is called when all bytes have arrived."""
        ports = (self._ports_of(source)[0], self._ports_of(destination)[1], *self._fabric)
        flow = Flow(size * _FINE * SECOND_NS, ports)
        flow.process = self._clock.start(self._carry(flow, on_end))
        return flow

    def _carry(self, flow: Flow, on_end: Callable[[], None]) -> ProcessGenerator:
        clock = self._clock
        yield clock.until(clock.now_ns + self._latency_ns, TRANSFER_ENDS)
        if flow.cancelled:
            return
        for port in flow.ports:
            port.flows[flow] = None
        self._share(flow.ports)
        while not flow.cancelled:
            try:
                yield clock.until(flow.ends_ns, TRANSFER_ENDS) if flow.rate else clock.event()
            except Interrupt:
                continue  # its rate has changed, or it was cancelled
            self._leave(flow)
            on_end()
            return

    def cancel(self, flow: Flow) -> None:
        """Stop `flow`; do nothing if it has ended."""
        flow.cancelled = True
        if flow in flow.ports[0].flows:
            self._leave(flow)
            self._wake(flow)

    def lose(self, replica: int) -> None:
        """Cut `replica` off until `restore` is called. Its present flows start over then."""
        self._losses[replica] += 1
        for port in self._ports_of(replica):
            port.capacity = 0
            for flow in port.flows:
                flow.left, flow.rate = flow.size, 0
                self._wake(flow)
        self._share(self._ports_of(replica))

    def restore(self, replica: int) -> None:
        """End one loss of the link of `replica`; the link works again if no other loss remains."""
        self._losses[replica] -= 1
        if self._losses[replica]:
            return
        self._open(replica)

    def flows(self, replica: int) -> int:
        """Return the number of flows into or out of `replica` now, whichever is larger."""
        return max(len(port.flows) for port in self._ports_of(replica))

    def take(self, replica: int, part: int, whole: int) -> None:
        """Let other traffic take `part / whole` of the link of `replica` in both directions, until the next call."""
        if self._taken.get(replica, (0, 1)) != (part, whole):
            self._taken[replica] = part, whole
            if not self._losses[replica]:
                self._open(replica)

    def _open(self, replica: int) -> None:
        part, whole = self._taken.get(replica, (0, 1))
        for port in self._ports_of(replica):
            port.capacity = self._nic - self._nic * part // whole
        self._share(self._ports_of(replica))

    def _ports_of(self, replica: int) -> tuple[Port, Port]:
        if replica not in self._ports:
            self._ports[replica] = Port(self._nic), Port(self._nic)
        return self._ports[replica]

    def _leave(self, flow: Flow) -> None:
        for port in flow.ports:
            del port.flows[flow]
        self._share(flow.ports)

    def _wake(self, flow: Flow) -> None:
        """Let the process of `flow` read its rate again, unless that process is the one that runs."""
        if flow.process is not None and flow.process is not self._clock.active_process:
            flow.process.interrupt()

    def _share(self, touched: Iterable[Port]) -> None:
        """Set new rates for all flows that share a port with the ports `touched`, directly or through other flows."""
        now = self._clock.now_ns
        for flow, rate in max_min_rates(_connected(touched)).items():
            if rate == flow.rate:
                continue  # the rate, and so the end of the flow, does not change
            flow.left = max(flow.left - flow.rate * (now - flow.since_ns), 0)
            flow.since_ns, flow.rate = now, rate
            self._wake(flow)


def max_min_rates(ports: list[Port]) -> dict[Flow, int]:
    """Return the max-min fair rate of every flow through `ports`; `ports` must include all ports of these flows."""
    left = {port: port.capacity for port in ports}
    rising = {port: len(port.flows) for port in ports}
    rates: dict[Flow, int] = {}
    while any(rising.values()):
        full = min((port for port in ports if rising[port]), key=lambda port: left[port] // rising[port])
        share = left[full] // rising[full]
        for flow in full.flows:
            if flow not in rates:
                rates[flow] = share
                for port in flow.ports:
                    left[port] -= share
                    rising[port] -= 1
    return rates


def _connected(ports: Iterable[Port]) -> list[Port]:
    """Return `ports`, and all ports that are connected to them by flows."""
    reached = dict.fromkeys(ports)
    to_visit = list(reached)
    for port in to_visit:
        for flow in port.flows:
            for other in flow.ports:
                if other not in reached:
                    reached[other] = None
                    to_visit.append(other)
    return to_visit


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
