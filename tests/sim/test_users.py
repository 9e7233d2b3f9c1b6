"""Users who think between answers, against the machine-repairman model, and the end of their time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serving.test_clients import workloads
from tests.sim.test_queueing import ONE_SLOT
from tokentwin.serving.clients import Clients
from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink
from tokentwin.traces.synth import parse_spec, synthesise

SERVICE_S, THINK_S = 0.2, 2.0


def mva(users: int) -> tuple[float, float]:
    """Return requests per second and mean response in seconds of one exponential server, exactly.

    Mean value analysis (Reiser and Lavenberg, 1980): an arrival finds the queue of a system with one user fewer.
    """
    queue, rate, response = 0.0, 0.0, SERVICE_S
    for n in range(1, users + 1):
        response = SERVICE_S * (1 + queue)
        rate = n / (response + THINK_S)
        queue = rate * response
    return rate, response


@pytest.mark.parametrize("users", [1, 5, 12, 25])
def test_throughput_and_response_are_those_of_the_machine_repairman(users: int) -> None:
    spec = {
        "duration_s": 4000,
        "warm_up_s": 100,
        "arrivals": {"kind": "users", "users": users, "think_ms": {"kind": "exponential", "mean": 1000 * THINK_S}},
        "prompt": {"kind": "exponential", "mean": 1000},
        "output": 1,
    }
    sink = TableSink()
    cost = TokenCost(0, round(SERVICE_S * 1e6), 0)  # in proportion to the prompt
    cluster = Cluster(Deployment(scheduler=SchedulerConfig(**ONE_SLOT)), cost, sink, shares_prefixes=False, steps=False)
    cluster.run(synthesise(parse_spec(spec)))
    arrival, finish = (sink.requests[name].to_numpy() for name in ("arrival_ns", "finish_ns"))
    rate, response = mva(users)
    assert arrival.min() >= 100e9 and arrival.max() < 4000e9
    assert len(arrival) / 3900 == pytest.approx(rate, rel=0.04)
    assert (finish - arrival).mean() / 1e9 == pytest.approx(response, rel=0.09)


@given(workload=workloads(), until=st.integers(0, 60), data=st.data())
def test_nobody_sends_after_the_end_and_nothing_waits_for_ever(
    workload: Workload, until: int, data: st.DataObject
) -> None:
    """Until the end, everything is as without an end."""

    def sent(until_ns: int | None) -> list[tuple[int, int]]:
        workload_until = Workload(workload.requests, concurrency=workload.concurrency, until_ns=until_ns)
        clients = Clients(workload_until)
        times, now, under_way = [], 0, []
        while True:
            while clients.next_ns is not None and (not under_way or clients.next_ns < under_way[0][0]):
                now = clients.next_ns
                request = clients.pop()
                times.append((now, request.id))
                under_way.append((now + service[request.id], request.id, request))
                under_way.sort(key=lambda entry: entry[:2])
            if not under_way:
                break
            now, _, request = under_way.pop(0)
            clients.ended(request, now)
        assert clients.exhausted
        return times

    service = {request.id: data.draw(st.integers(1, 20)) for request in workload.requests}
    assert sent(until) == [entry for entry in sent(None) if entry[0] < until]


def test_the_first_requests_of_a_closed_loop_may_be_its_warm_up() -> None:
    requests = [WorkloadRequest(n, 0, (("", 5000),), 2) for n in range(40)]
    sink = TableSink()
    deployment = Deployment(scheduler=SchedulerConfig(**ONE_SLOT))
    cluster = Cluster(deployment, TokenCost(0, 1000, 0), sink, shares_prefixes=False, steps=False)
    cluster.run(Workload(requests, concurrency=4, shares_prefixes=False, warm_up_requests=15))
    assert np.array_equal(np.sort(sink.requests["request_id"].to_numpy()), np.arange(15, 40))
