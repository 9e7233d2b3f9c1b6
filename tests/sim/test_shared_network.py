"""Collectives and KV transfers on the same adapters: closed forms of who waits for whom."""

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simpy.events import ProcessGenerator

from tokentwin.calibration.steps.external_calibration import predicted_cost
from tokentwin.planning.diagnose.lifted_costs import with_free_prefill, without_cpu_time
from tokentwin.serving.cost_model import NetworkedCost, TokenCost
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.fleet import FleetConfig, LinksConfig, PoolConfig
from tokentwin.serving.deployments.kv_layout import states_bytes
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.sim.clock import VirtualClock
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.links import Links, SharedNetwork
from tokentwin.sim.run_log import TableSink

GB, MS = 10**9, 10**6
BYTES = 1000  # of KV a token


class Wired(TokenCost):
    """Step times of 10 ms, during which the network is busy for `network` ns."""

    def __init__(self, network: int) -> None:
        super().__init__(10 * MS, 0, 0)
        self.network = network

    def network_ns(self, tokens: int) -> int:
        return self.network


@given(st.integers(0, 10 * MS), st.integers(0, 5), st.integers(1, 40))
def test_a_step_and_transfers_beside_it_share_the_link(network: int, flows: int, megabytes: int) -> None:
    """Steps back to back until all transfers, which begin together, are there: no byte is lost or sent twice."""
    clock = VirtualClock()
    links, ends, steps = Links(clock, 0, GB), [], []
    shared = SharedNetwork(links, 0, Wired(network))
    for other in range(flows):
        links.start(1 + other, 0, megabytes * MS, lambda: ends.append(clock.now_ns))

    def run_steps() -> ProcessGenerator:
        yield clock.until(1)
        while len(ends) < flows or not steps:
            steps.append((clock.now_ns, 10 * MS + shared.wait_ns(1, 10 * MS), links.flows(0)))
            yield clock.until(clock.now_ns + steps[-1][1])
        shared.rest()

    clock.start(run_steps())
    clock.run()
    _, stretched, beside = steps[0]
    assert beside == flows and stretched == 10 * MS + flows * network  # k + 1 times as long, and as ever alone
    sent = flows * megabytes * MS  # bytes, or nanoseconds at 1 GB/s, which the link was free for
    if flows:
        free = sum(max(min(ends[-1], at + ns) - at, 0) * (ns - network) / ns for at, ns, _ in steps)
        assert free == pytest.approx(sent, rel=1e-3, abs=len(steps) + 2)


def test_alone_each_is_as_ever_and_together_they_take_twice_as_long() -> None:
    clock = VirtualClock()
    links, ends = Links(clock, 0, GB), []
    shared = SharedNetwork(links, 0, Wired(10 * MS))
    assert shared.wait_ns(1, 10 * MS) == 0
    shared.rest()
    links.start(1, 0, 20 * MS, lambda: ends.append(clock.now_ns))

    def step() -> ProcessGenerator:
        yield clock.until(1)
        ends.append(shared.wait_ns(1, 10 * MS))  # nothing but network, beside one flow

    clock.start(step())
    clock.run()
    assert ends[0] == 10 * MS
    assert ends[1] == pytest.approx(40 * MS, abs=2)  # half of the link instead of all of it


def run(shares: bool, cost: Any, nodes: int = 2, requests: int = 6, steps: bool = True, **engine: Any) -> pa.Table:
    links = LinksConfig(nic_gb_s=0.01, latency_us=0, kv_bytes_per_token=BYTES, shares_inter_node=shares)
    pools = (PoolConfig(name="p", role="prefill"), PoolConfig(name="d", role="decode"))
    sink = TableSink()
    deployment = Deployment(**{"tensor_parallel_size": 8 * nodes} | engine)
    offered = Workload([WorkloadRequest(id, id * 5 * MS, (("", 400),), 30) for id in range(requests)])
    fleet = FleetConfig(pools=pools, links=links)
    Cluster(deployment, cost, sink, fleet=fleet, steps=steps, leaps=not steps).run(offered)
    return sink.requests.sort_by("request_id")


def test_a_fleet_whose_kv_shares_the_adapters_is_slower_and_one_that_does_not_is_unchanged() -> None:
    apart, shared = run(False, Wired(5 * MS)), run(True, Wired(5 * MS))
    assert run(True, Wired(5 * MS), nodes=1).equals(run(False, Wired(5 * MS), nodes=1))
    assert run(True, Wired(0)).equals(run(False, Wired(0)))
    for name in ("finish_ns", "transfer_ns"):
        before, after = apart[name].to_pylist(), shared[name].to_pylist()
        assert all(late >= early for early, late in zip(before, after, strict=True)) and sum(after) > sum(before)


@pytest.mark.parametrize("ranks", [1, 16])
def test_between_steps_the_link_is_free(ranks: int) -> None:
    """Steps that are nothing but network leave it to a transfer when they end; so do ranks that step together."""
    engine: dict[str, Any] = {}
    if ranks > 1:
        engine = {"model": "DeepSeek-V3", "tensor_parallel_size": 1, "data_parallel_size": ranks}
    apart, shared = (run(shares, Wired(10 * MS), requests=1, **engine) for shares in (False, True))
    assert shared["transfer_ns"].equals(apart["transfer_ns"]) and shared["finish_ns"].equals(apart["finish_ns"])
    assert run(True, Wired(10 * MS), **engine)["finish_ns"].null_count == 0


def test_the_same_with_every_step_kept_and_without() -> None:
    assert run(True, Wired(5 * MS)).equals(run(True, Wired(5 * MS), steps=False))


def test_what_the_network_carries_is_known_from_kernels_alone() -> None:
    with pytest.raises(UserError, match="needs the kernel tables of a GPU"):
        run(True, TokenCost(10 * MS, 0, 0))
    wide = Deployment(model="Llama-3.1-70B", device="cuda", tensor_parallel_size=16)
    cost = predicted_cost("H100", wide)
    sent = 2 * 80 * 2 * 64 * 8192 * 2 / 8 / 2  # two all-reduces a layer, of an eighth of 64 rows, twice a half of it
    assert cost.network_ns(64) == pytest.approx(sent / 50e9 * 1e9, rel=1e-3)
    assert "shares_inter_node" not in LinksConfig().model_dump_json()
    for lifted in (with_free_prefill(cost), without_cpu_time(cost)):
        assert isinstance(lifted, NetworkedCost) and lifted.network_ns(64) == cost.network_ns(64)


def test_constant_states_go_over_with_the_kv() -> None:
    wide = Deployment(model="Qwen3.5-397B-A17B", tensor_parallel_size=8)
    state = 64 * 128 * 128 * 4 + (2 * 16 * 128 + 64 * 128) * 3 * 2  # of a layer: float32, a convolution of 4
    assert states_bytes(wide) == 45 * state
    assert states_bytes(wide.model_copy(update={"model": "Llama-3.1-8B"})) == 0 == states_bytes(Deployment())
