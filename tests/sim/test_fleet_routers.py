"""Routers: shares, affinity, tails that theory predicts, and a cost that does not grow with the fleet."""

import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.budget import simulated, within
from tests.sim.fleet_samples import MS, ONE_SLOT, FleetRun, S, poisson
from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import WorkloadRequest
from tokentwin.sim.replica import Replica
from tokentwin.sim.router import ROUTERS, ReplicaSet, find_router
from tokentwin.sim.routers.predicted_latency import _OnlineLine


def by_replica(run):
    return Counter(row["replica"] for row in run.rows)


# The least loaded


class Loaded(Replica):
    """A replica of which only the load matters."""

    def __init__(self, index):
        self.index = index
        self.outstanding_requests = 0
        self.listeners = []


def load_of(replica):
    return replica.outstanding_requests


@given(st.lists(st.tuples(st.sampled_from(["route", "end", "join", "leave"]), st.integers(0, 30)), max_size=300))
def test_the_least_loaded_is_what_looking_at_all_would_find(events):
    members, made = ReplicaSet(), [Loaded(index) for index in range(3)]
    for replica in made:
        members.join(replica)
    for event, pick in events:
        if event == "route" and members:
            chosen = members.least(load_of)
            assert chosen is min(members, key=load_of)  # the first among equals
            chosen.outstanding_requests += 1 + pick % 3
        elif event == "end" and (busy := [replica for replica in made if replica.outstanding_requests]):
            replica = busy[pick % len(busy)]
            replica.outstanding_requests -= 1
            for listener in replica.listeners:
                listener.load_shrank(replica)
        elif event == "join":
            made.append(Loaded(len(made)))
            members.join(made[-1])
        elif event == "leave" and members:
            members.leave(members[pick % len(members)])
        assert [r.index for r in members] == sorted(r.index for r in members)


@pytest.mark.parametrize(
    "router, load", [("least-requests", "requests"), ("least-tokens", "tokens"), ("kv-aware", "kv")]
)
def test_each_least_router_evens_out_its_own_load(router, load):
    """One long request, then short ones: they go where the router's load is less."""
    long = WorkloadRequest(0, 0, (("", 600),), 400)
    short = [WorkloadRequest(i, i, (("", 30),), 20) for i in range(1, 20)]
    run = FleetRun({"pools": [{"replicas": 2}], "router": router}, [long, *short])
    with_the_long_one = by_replica(run)[0] - 1
    # 50 tokens each when done and 30 known at arrival, against 1000 and 600
    assert with_the_long_one == {"requests": 9, "tokens": 0, "kv": 0}[load]


def test_kv_awareness_counts_shares_of_unequal_memories():
    pools = [
        {"name": "small", "deployment": {"scheduler": {"num_blocks": 101}}},
        {"name": "large", "deployment": {"scheduler": {"num_blocks": 301}}},
    ]
    offered = [WorkloadRequest(i, i, (("", 100),), 20) for i in range(40)]
    served = by_replica(FleetRun({"pools": pools, "router": "kv-aware"}, offered))
    assert served == {0: 10, 1: 30}


def test_predicted_latency_finds_the_weights_of_loads_and_keeps_its_choices():
    """Prompts of two lengths, where a long one takes as much time as 40 short ones: requests alone say little."""
    rng = np.random.default_rng(5)
    arrivals = np.cumsum(rng.exponential(0.02 * S, 1500)).astype(int).tolist()
    prompts = np.where(rng.random(1500) < 0.1, 4000, 100).tolist()
    offered = [WorkloadRequest(i, at, (("", p),), 8) for i, (at, p) in enumerate(zip(arrivals, prompts, strict=True))]
    cost = TokenCost(MS, 100_000, 0)

    def p90_s(router):
        run = FleetRun(
            {"pools": [{"replicas": 4}], "router": router}, offered, cost, num_blocks=20_000, max_model_len=8192
        )
        latencies = [row["finish_ns"] - row["arrival_ns"] for row in run.rows]
        return np.percentile(latencies, 90) / S, [row["replica"] for row in run.rows]

    learnt, chosen = p90_s("predicted-latency")
    assert learnt < 0.9 * p90_s("round-robin")[0]
    assert learnt < 1.05 * p90_s("least-requests")[0]
    assert chosen == p90_s("predicted-latency")[1]


def test_online_least_squares_finds_a_line():
    line, rng = _OnlineLine(), np.random.default_rng(1)
    for _ in range(400):
        features = (1.0, *rng.uniform(0, 3, 2).tolist(), 0.0)
        line.learn(features, 5.0 + 2.0 * features[1] + 7.0 * features[2])
    assert line.predict((1.0, 2.0, 1.0, 0.0)) == pytest.approx(16.0, rel=1e-3)
    assert line.predict((-10.0, 0.0, 0.0, 0.0)) == 0.0


# Chance


@pytest.mark.statistical
@pytest.mark.parametrize("router", ["random", "power-of-two"])
def test_chance_is_fair_and_seeded(router):
    count = simulated(4000)
    offered = poisson(count, 100, prompts=1, outputs=1)
    runs = [
        FleetRun({"pools": [{"replicas": 4}], "router": {"name": router, "settings": {"seed": seed}}}, offered)
        for seed in (1, 1, 2)
    ]
    assert runs[0].requests.equals(runs[1].requests) and not runs[0].requests.equals(runs[2].requests)
    counts = by_replica(runs[0])
    assert all(abs(counts[index] - count / 4) < 4 * np.sqrt(count * 0.25 * 0.75) for index in range(4))


@pytest.mark.statistical
@pytest.mark.parametrize("router", ["random", "power-of-two"])
def test_queues_have_the_tails_of_the_supermarket_model(router):
    """Share of replicas with at least i requests: rho^i at random, rho^(2^i - 1) with two choices (Mitzenmacher 2001).

    One request is one step, exponential but for a thousandth; 200 replicas are enough for the fluid limit to hold.
    """
    replicas, rho, tokens = 200, 0.8, 1000
    rng = np.random.default_rng(3)
    count = simulated(40_000)
    offered = poisson(
        count, replicas * rho * 1e9 / (tokens * 1000), 4, prompts=rng.geometric(1 / tokens, count), outputs=1
    )
    run = FleetRun({"pools": [{"replicas": replicas}], "router": router}, offered, TokenCost(0, 1000, 0), **ONE_SLOT)
    arrival, end, replica = run.column("arrival_ns"), run.column("end_ns"), run.column("replica")
    from_ns, to_ns = arrival[count // 4], arrival[-1]
    at_least = np.zeros(6)  # time replicas spend with at least i requests
    for index in range(replicas):
        mine = replica == index
        moments = np.concatenate([arrival[mine], end[mine]])
        steps = np.concatenate([np.ones(mine.sum()), -np.ones(mine.sum())])
        order = np.lexsort((steps, moments))
        held, moments = np.cumsum(steps[order]), np.clip(moments[order], from_ns, to_ns)
        for i in range(1, 6):
            at_least[i] += (np.diff(moments)[held[:-1] >= i]).sum()
    share = at_least / ((to_ns - from_ns) * replicas)
    for i in (1, 2, 3):
        theory = rho**i if router == "random" else rho ** (2**i - 1)
        assert share[i] == pytest.approx(theory, rel=within(0.06)), (i, share[i], theory)


# Affinity


def conversations(sessions=41, turns=4, shared=True):
    """Return sessions whose turns repeat all that was said; each begins with one of four system prompts if `shared`."""
    requests = []
    for turn in range(turns):
        for session in range(sessions):
            said = tuple((f"u{session}.{k}", 100) for k in range(turn + 1))
            opening = ((f"sys{session % 4}", 300),) if shared else ()
            id = len(requests)
            requests.append(WorkloadRequest(id, id * 40 * MS, opening + said, 5, session=f"s{session}", turn=turn))
    return requests


def test_turns_of_a_session_stick_to_one_replica():
    offered = conversations()
    run = FleetRun({"pools": [{"replicas": 5}], "router": "session-sticky"}, offered)
    homes = {}
    for request, row in zip(offered, run.rows, strict=True):
        homes.setdefault(request.session, set()).add(row["replica"])
    assert all(len(home) == 1 for home in homes.values())
    assert len(set.union(*homes.values())) == 5


def test_equal_prefixes_meet_and_different_ones_spread():
    offered = conversations(shared=False)
    run = FleetRun({"pools": [{"replicas": 5}], "router": "prefix-affinity"}, offered)
    homes = {}
    for request, row in zip(offered, run.rows, strict=True):
        homes.setdefault(request.prompt[0][0], set()).add(row["replica"])
    assert all(len(home) == 1 for home in homes.values())  # the load is far too low for the bound to matter
    assert len(set.union(*homes.values())) == 5


def test_affinity_gives_way_to_the_load_bound():
    """All requests begin alike and arrive at once: no replica may hold more than 1.25 times its share, rounded up."""
    offered = [WorkloadRequest(i, 0, (("sys", 300), ("", 20)), 30) for i in range(100)]
    served = by_replica(FleetRun({"pools": [{"replicas": 8}], "router": "prefix-affinity"}, offered))
    assert max(served.values()) <= np.ceil(1.25 * 100 / 8)
    unbounded = {"name": "prefix-affinity", "settings": {"load_bound": 1000.0}}
    assert len(by_replica(FleetRun({"pools": [{"replicas": 8}], "router": unbounded}, offered))) == 1


@pytest.mark.parametrize("router", ["session-sticky", "prefix-affinity"])
def test_only_keys_of_a_lost_replica_move(router):
    """Consistent hashing: when one of five crashes, sessions of the other four stay where they were."""
    offered = conversations(turns=2, shared=False)
    crash = {"at_s": offered[40].arrival_ns / 1e9 + 0.02, "replica": 2, "recovery_s": None}
    fleet = {"pools": [{"replicas": 5}], "router": router, "failures": {"crashes": [crash]}}
    rows = FleetRun(fleet, offered).rows
    moved = [(before["replica"], after["replica"]) for before, after in zip(rows[:41], rows[41:], strict=True)]
    assert {before for before, after in moved if before != after} == {2}
    assert len({after for before, after in moved if before == 2}) > 1


def test_affinity_finds_more_of_the_prefix_cache_than_round_robin():
    hits = {}
    for router in ("round-robin", "prefix-affinity"):
        run = FleetRun({"pools": [{"replicas": 5}], "router": router}, conversations(), shares_prefixes=True)
        hits[router] = run.column("prefix_hit_tokens").sum()
    assert hits["prefix-affinity"] > 1.2 * hits["round-robin"]


def test_a_router_without_its_key_takes_the_least_loaded():
    offered = poisson(100, 50)
    private = [FleetRun({"pools": [{"replicas": 3}], "router": r}, offered) for r in ROUTERS if r in AFFINE]
    least = FleetRun({"pools": [{"replicas": 3}], "router": "least-requests"}, offered)
    assert len(private) == 2 and all(run.requests.equals(least.requests) for run in private)


AFFINE = ("prefix-affinity", "session-sticky")

# SLO classes and pools


def test_classes_keep_to_the_pools_reserved_for_them():
    pools = [
        {"name": "chat", "replicas": 2, "slo_classes": ["chat", "vip"]},
        {"name": "vip", "replicas": 1, "slo_classes": ["vip"]},
        {"name": "rest", "replicas": 2},
    ]
    offered = [
        WorkloadRequest(i, i * MS, (("", 20),), 5, slo_class=("chat", "vip", "batch", "")[i // 3 % 4])
        for i in range(80)
    ]
    run = FleetRun({"pools": pools, "router": "round-robin"}, offered)
    served = {}
    for row in run.rows:
        served.setdefault(row["slo_class"], set()).add(row["replica"])
    assert served == {"chat": {0, 1}, "vip": {0, 1, 2}, "batch": {3, 4}, "": {3, 4}}


def test_where_every_pool_is_reserved_others_may_use_all():
    pools = [{"name": "a", "slo_classes": ["a"]}, {"name": "b", "slo_classes": ["b"]}]
    run = FleetRun({"pools": pools}, poisson(10, 10))
    assert set(by_replica(run)) == {0, 1}


# A user's own, and bad settings


class Biased:
    """A router that sends a share to the last replica, the rest to the first."""

    def __init__(self, every=2):
        self._every = every

    def choose(self, request, replicas):
        return replicas[-1] if request.id % self._every == 0 else replicas[0]


def test_a_router_of_ones_own_takes_its_settings():
    router = {"name": f"{__name__}:Biased", "settings": {"every": 5}}
    run = FleetRun({"pools": [{"replicas": 3}], "router": router}, poisson(50, 20))
    assert by_replica(run) == {0: 40, 2: 10}


@pytest.mark.parametrize(
    "name, settings",
    [("random", {"sede": 1}), ("prefix-affinity", {"load_bound": 1}), ("prefix-affinity", {"prefix_tokens": 0})],
)
def test_wrong_settings_are_one_line(name, settings):
    with pytest.raises(UserError) as error:
        find_router(name, **settings)
    assert "\n" not in str(error.value) and next(iter(settings)) in str(error.value)


# What a choice costs


@pytest.mark.parametrize("router", sorted(ROUTERS.keys() - {"predicted-latency"}))  # which looks at all replicas
def test_a_choice_takes_about_as_much_work_in_a_large_fleet(router):
    """Function calls per request, fleet of 20 against 400 with twenty times the arrivals; setting up is not counted."""

    def calls(replicas, offered):
        counted = 0

        def count(frame, event, argument):
            nonlocal counted
            counted += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            FleetRun({"pools": [{"replicas": replicas}], "router": router}, offered)
        finally:
            sys.setprofile(None)
        return counted

    def calls_per_request(replicas):
        offered = [
            WorkloadRequest(r.id, r.arrival_ns, ((f"p{r.id % 97}", 20),), 4, session=f"s{r.id % 211}")
            for r in poisson(500, 40.0 * replicas)
        ]
        return (calls(replicas, offered) - calls(replicas, offered[:1])) / len(offered)

    few, many = calls_per_request(20), calls_per_request(400)
    assert many < 2 * few, f"{few:.0f} calls a request among 20 replicas, {many:.0f} among 400"
