"""Links against closed forms, and max-min fairness against its definition."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentwin.sim.clock import VirtualClock
from tokentwin.sim.links import Flow, Links, Port, max_min_rates

GB, MS, S = 1_000_000_000, 1_000_000, 1_000_000_000
LATENCY = 20_000


class Transfers:
    """Flows `(at_ns, source, destination, bytes)` over links, and when each ended; `then` happens on the way."""

    def __init__(self, flows, nic=50 * GB, fabric=None, latency=LATENCY, then=()):
        self.clock = VirtualClock()
        self.links = Links(self.clock, latency, nic, fabric)
        self.flows, self.ends = {}, {}
        for number, flow in enumerate(flows):
            self.clock.start(self._start(number, *flow))
        for at_ns, what in then:
            self.clock.start(self._then(at_ns, what))
        self.clock.run()

    def _then(self, at_ns, what):
        yield self.clock.until(at_ns)
        what(self)

    def _start(self, number, at_ns, source, destination, size):
        yield self.clock.until(at_ns)
        ended = lambda: self.ends.__setitem__(number, self.clock.now_ns)  # noqa: E731
        self.flows[number] = self.links.start(source, destination, size, ended)


def test_one_flow_takes_latency_and_bytes_over_bandwidth():
    assert Transfers([(7, 0, 1, 2 * GB)]).ends == {0: 7 + LATENCY + 40 * MS}
    assert Transfers([(7, 0, 1, 0)]).ends == {0: 7 + LATENCY}
    assert Transfers([(0, 0, 1, 2 * GB)], fabric=20 * GB).ends == {0: LATENCY + 100 * MS}


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64])
def test_equal_flows_out_of_one_port_or_into_one_take_count_times_as_long(count):
    out = Transfers([(0, 0, 1 + to, 2 * GB) for to in range(count)])
    into = Transfers([(0, 1 + source, 0, 2 * GB) for source in range(count)])
    for ends in (out.ends, into.ends):
        assert len(ends) == count
        assert all(0 <= end - LATENCY - count * 40 * MS <= 1 for end in ends.values())


def test_disjoint_pairs_do_not_disturb_each_other_until_they_share_a_fabric():
    pairs = [(0, 2 * n, 2 * n + 1, 2 * GB) for n in range(5)]
    assert set(Transfers(pairs).ends.values()) == {LATENCY + 40 * MS}
    assert set(Transfers(pairs, fabric=50 * GB).ends.values()) == {LATENCY + 200 * MS}
    assert set(Transfers(pairs, fabric=250 * GB).ends.values()) == {LATENCY + 40 * MS}


def test_both_directions_of_a_link_are_separate():
    assert set(Transfers([(0, 0, 1, 2 * GB), (0, 1, 0, 2 * GB)]).ends.values()) == {LATENCY + 40 * MS}


def test_a_late_flow_takes_half_of_what_is_left():
    ends = Transfers([(0, 0, 1, 2 * GB), (20 * MS, 0, 2, 2 * GB)]).ends
    assert ends == {0: LATENCY + 60 * MS, 1: LATENCY + 80 * MS}


def test_what_a_flow_cannot_use_goes_to_the_others():
    """Three flows into port 9 leave the one out of 0 a third there; its neighbour out of 0 gets two thirds."""
    flows = [(0, 0, 9, 1 * GB), (0, 1, 9, 1 * GB), (0, 2, 9, 1 * GB), (0, 0, 8, 2 * GB)]
    ends = Transfers(flows).ends
    assert all(abs(end - LATENCY - 60 * MS) <= 2 for end in ends.values())


def test_a_cancelled_flow_leaves_its_share_and_never_ends():
    cancel = (LATENCY + 20 * MS, lambda run: run.links.cancel(run.flows[1]))
    run = Transfers([(0, 0, 1, 2 * GB), (0, 0, 2, 2 * GB)], then=[cancel])
    assert run.ends == {0: LATENCY + 60 * MS - 10 * MS}


def test_over_a_lost_link_everything_starts_over():
    lose, restore = (LATENCY + 30 * MS, lambda run: run.links.lose(1)), (100 * MS, lambda run: run.links.restore(1))
    flows = [(0, 0, 1, 2 * GB), (0, 2, 3, 2 * GB), (50 * MS, 2, 1, 2 * GB)]
    ends = Transfers(flows, then=[lose, restore]).ends
    assert ends == {0: 180 * MS, 1: LATENCY + 40 * MS, 2: 180 * MS}


small_flows = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 3), st.integers(4, 7), st.integers(0, 40)), min_size=1, max_size=12
)


@given(flows=small_flows, fabric=st.sampled_from([None, 3, 10]))
def test_rates_are_max_min_fair(flows, fabric):
    """No port over capacity, and every flow has a full port in which nobody gets more than it."""
    names = [*range(8), *(["fabric"] if fabric else [])]
    ports = {name: Port(1_000_000 * (fabric if name == "fabric" else 6 + name)) for name in names}
    made = []
    for _, source, destination, _ in flows:
        through = tuple(ports[name] for name in (source, destination, *names[8:]))
        made.append(Flow(1, through))
        for port in through:
            port.flows[made[-1]] = None
    rates = max_min_rates(list(ports.values()))
    assert set(rates) == set(made)
    taken = {port: sum(rates[flow] for flow in port.flows) for port in ports.values()}
    assert all(taken[port] <= port.capacity for port in taken)
    rounding = len(made) ** 2
    for flow in made:
        assert any(
            taken[port] >= port.capacity - rounding and rates[flow] >= max(rates[f] for f in port.flows) - rounding
            for port in flow.ports
        )


@given(flows=small_flows, fabric=st.sampled_from([None, 30 * GB]))
def test_transfers_end_when_exact_fluid_flows_do(flows, fabric):
    """Work is conserved: a second program, in fractions and from the definition, ends within the rounding.

    Either way: what a flow loses to whole bytes a nanosecond, another that shares its port may gain.
    """
    flows = [(at * MS, source, destination, size * GB // 10) for at, source, destination, size in flows]
    run = Transfers(flows, fabric=fabric)
    expected = _fluid(flows, 50 * GB, fabric)
    assert run.ends.keys() == expected.keys()
    for number, end in run.ends.items():
        assert abs(end - expected[number]) <= len(flows) ** 2 + 1


def _fluid(flows, nic, fabric):
    """Return when each flow ends, by stepping from event to event with max-min fair rates."""
    left = {number: Fraction(size) for number, (_, _, _, size) in enumerate(flows)}
    begins = {number: Fraction(at + LATENCY) for number, (at, _, _, _) in enumerate(flows)}
    now, ends = Fraction(0), {}
    while left:
        active = [n for n in left if begins[n] <= now]
        for n in [n for n in active if not left[n]]:
            ends[n] = now
            del left[n]
            active.remove(n)
        rates = _raised({n: {("out", flows[n][1]), ("in", flows[n][2]), "fabric"} for n in active}, nic, fabric)
        coming = [begins[n] - now for n in left if begins[n] > now] + [left[n] / rates[n] for n in active]
        if not coming:
            break
        for n in active:
            left[n] -= min(coming) * rates[n]
        now += min(coming)
    return ends


def _raised(ports_of, nic, fabric):
    """Return each flow's bytes a nanosecond: all rates that can still rise are raised together until none can."""
    rates, rising = dict.fromkeys(ports_of, Fraction(0)), set(ports_of)
    capacity = {p: Fraction(nic, S) for ports in ports_of.values() for p in ports}
    if fabric is None:
        capacity.pop("fabric", None)
    elif "fabric" in capacity:
        capacity["fabric"] = Fraction(fabric, S)
    while rising:
        room = {
            p: (c - sum(rates[n] for n in ports_of if p in ports_of[n])) / count
            for p, c in capacity.items()
            if (count := sum(p in ports_of[n] for n in rising))
        }
        step = min(room.values())
        for n in rising:
            rates[n] += step
        full = {p for p, r in room.items() if r == step}
        rising = {n for n in rising if not ports_of[n] & full}
    return rates
