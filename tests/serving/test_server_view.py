"""Policies and routers of one's own see what a server sees of a request, and decide as built-in ones nevertheless."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.deployments.fleet import FleetConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.policies.sjf import SjfScheduler
from tokentwin.serving.policies.vllm import VllmScheduler
from tokentwin.serving.request import Request
from tokentwin.serving.scheduler import POLICIES
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink

COST = TokenCost(6_000_000, 20_000, 400)
LIMITS = {"max_num_batched_tokens": 128, "max_num_seqs": 4, "num_blocks": 60, "max_model_len": 640}
TRUE = ("true_len", "true_unscheduled", "true_exit_clock", "truth")  # clairvoyant, and say so
WATCHED: list[dict[int | str, object]] = []


def public(request: Request) -> str:
    names = (name for name in dir(request) if not name.startswith("_") and name not in (*TRUE, "decodes"))
    return str([(name, value) for name in names if not callable(value := getattr(request, name))])


class Watches(VllmScheduler):
    def schedule(self):
        plan = super().schedule()
        WATCHED[-1].setdefault(plan.seq, [public(request) for request in self.requests.values()])
        return plan


class Router:
    def choose(self, request, replicas):
        WATCHED[-1][f"request {request.id}"] = str(request)
        return replicas[0]


def rows(policy: str, requests: list[WorkloadRequest], router: str = "round-robin", **scheduler: object) -> list[dict]:
    deployment = Deployment(policy=policy, scheduler=SchedulerConfig(**{**LIMITS, **scheduler}))
    fleet, sink = FleetConfig.model_validate({"pools": [{"replicas": 2}], "router": router}), TableSink()
    cluster = Cluster(deployment, COST, sink, fleet=fleet, steps=not scheduler.get("leaps"), shares_prefixes=False)
    cluster.run(Workload(requests, shares_prefixes=False))
    return sink.requests.sort_by("request_id").to_pylist()


@st.composite
def traffic(draw: st.DrawFn) -> list[WorkloadRequest]:
    """Requests with stop tokens before `max_tokens`, hang-ups and stop strings."""
    requests = []
    for id in range(draw(st.integers(1, 14))):
        output = draw(st.integers(1, 40))
        limit = draw(st.none() | st.integers(output, output + 30))
        one = WorkloadRequest(id, id * draw(st.integers(0, 40)) * 1_000_000, (("", draw(st.integers(1, 200))),), output)
        leaves = one.arrival_ns + draw(st.integers(1, 400)) * 1_000_000
        cut = draw(st.sampled_from([{}, {}, {"cancel_ns": leaves}, {"stop_ns": leaves}]))
        requests.append(replace(one, max_tokens=limit, **cut))
    return sorted(requests, key=lambda request: (request.arrival_ns, request.id))


@given(
    traffic(), st.booleans(), st.booleans(), st.sampled_from(sorted({*POLICIES} - {"sjf"})), st.sampled_from([0, 0.5])
)
def test_a_class_of_ones_own_decides_as_the_built_in_policy(requests, overlapped, leaps, policy, error):
    more = {"async_scheduling": overlapped, "sjf_error": error}
    assert rows(POLICIES[policy], requests, **more) == rows(policy, requests, **more)


@given(traffic(), st.booleans())
def test_predicted_lengths_come_through_the_contract(requests, overlapped):
    more = {"async_scheduling": overlapped, "sjf_error": 0.5, "sjf_seed": 3}
    assert rows(POLICIES["sjf"], requests, **more) == rows("sjf", requests, **more)


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("router", ["round-robin", f"{__name__}:Router"])
def test_nothing_shows_where_an_answer_ends(router: str, overlapped: bool) -> None:
    """Until the first answer ends, two runs that differ in later events look alike."""
    WATCHED.clear()
    alike = [WorkloadRequest(id, id * 5_000_000, (("", 60),), 20, max_tokens=50) for id in range(8)]
    other = [replace(one, output_len=20 + one.id, cancel_ns=10**10, stop_ns=None) for one in alike]
    for requests in (alike, other):
        WATCHED.append({})
        rows(f"{__name__}:Watches", requests, router, async_scheduling=overlapped)
    one, two = WATCHED
    assert all(one[step] == two[step] for step in range(16)) and len(one[15]) >= 4
    assert all(one[key] == two[key] for key in one if isinstance(key, str))


def test_without_predictions_a_class_of_ones_own_ranks_by_the_limit() -> None:
    short = WorkloadRequest(0, 0, (("", 9),), 1, max_tokens=50)
    made = Request(short.server_view())
    scheduler = SjfScheduler(SchedulerConfig(**LIMITS))
    assert scheduler.score(made) == 50 and scheduler.score(Request(short)) == 1


# Settings


WRITES = """
from tokentwin.serving.policies.vllm import VllmScheduler

class Constructs(VllmScheduler):
    def __init__(self, config, **engine):
        object.__setattr__(config, "max_num_batched_tokens", 4096)
        super().__init__(config, **engine)

class InPlace(VllmScheduler):
    def __init__(self, config, **engine):
        config.edf_ttft_ms["chat"] = 1.0
        super().__init__(config, **engine)

class Later(VllmScheduler):
    def schedule(self):
        vars(self.config)["max_num_batched_tokens"] = self._budget = self._most_scheduled = 4096
        return super().schedule()

class Longer(VllmScheduler):
    def add(self, arrived, outputs=0):
        vars(self.config)["max_model_len"] = 10**6
        return super().add(arrived, outputs)

class Fewer(VllmScheduler):
    def __init__(self, config, **engine):
        super().__init__(config.model_copy(update={"max_num_seqs": 2}), **engine)

class Prices:
    def __init__(self, deployment):
        vars(deployment.scheduler)["num_blocks"] = 10**6

    def step_ns(self, plan):
        return 1000
"""
SAYS = {
    "Constructs": "writes to its settings: max_num_batched_tokens 4096 instead of 128",
    "InPlace": "writes to its settings: edf_ttft_ms {'chat': 1.0} instead of {}",
    "Later": "plans [0-9]+ tokens; the deployment's max_num_batched_tokens is 128",
    "Longer": "request 5: is accepted with 720 tokens; the deployment's max_model_len is 640",
}


@pytest.mark.parametrize("name", [*SAYS, "Fewer"])
def test_a_policy_does_not_raise_its_limits(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WRITES)
    requests = [WorkloadRequest(id, 0, (("", 100 + 120 * id),), 20) for id in range(8)]
    config = SchedulerConfig(**LIMITS)
    if name == "Fewer":
        rows(f"{tmp_path}/mine.py:Fewer", requests)
        return
    with pytest.raises(UserError, match=SAYS[name]) as caught:
        rows(f"{tmp_path}/mine.py:{name}", requests)
    assert "\n" not in str(caught.value) and config == SchedulerConfig(**LIMITS)


def test_nor_does_a_cost_model(tmp_path: Path) -> None:
    from tokentwin.planning.costs import priced

    (tmp_path / "mine.py").write_text(WRITES)
    deployment = Deployment(scheduler=SchedulerConfig(**LIMITS))
    with pytest.raises(UserError, match=r"writes to its settings: scheduler\.num_blocks 1000000 instead of 60"):
        priced(f"{tmp_path}/mine.py:Prices", None, deployment)
    assert deployment.scheduler.num_blocks == 60
