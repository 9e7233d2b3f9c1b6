"""Whatever a fleet goes through: every request is accounted for, and leaps over decode steps are exact."""

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.budget import examples
from tests.sim.fleet_samples import FleetRun, assert_everything_is_accounted_for, poisson
from tokentwin.sim.router import ROUTERS

SHORT = examples(0.3)

times = st.sampled_from([0.0, 0.3, 0.5, 1.1, 2.0])
pool_names = st.sampled_from([None, "a", "b"])
admissions = st.fixed_dictionaries(
    {},
    optional={
        "max_queued_per_replica": st.integers(1, 4),
        "max_queued": st.integers(1, 8),
        "queue_timeout_s": st.sampled_from([0.006, 0.05, 0.4]),
        "patience": st.fixed_dictionaries(
            {"mean_s": st.sampled_from([0.1, 0.7])},
            optional={
                "distribution": st.sampled_from(["exponential", "constant"]),
                "until": st.sampled_from(["first-token", "finish"]),
            },
        ),
        "retry": st.fixed_dictionaries(
            {
                "max_attempts": st.integers(1, 4),
                "backoff_s": st.sampled_from([0.01, 0.5]),
                "jitter": st.sampled_from([0, 1]),
            }
        ),
    },
)
failures = st.fixed_dictionaries(
    {},
    optional={
        "crashes": st.lists(
            st.fixed_dictionaries(
                {
                    "at_s": times,
                    "pool": pool_names,
                    "replica": st.integers(0, 2),
                    "recovery_s": st.sampled_from([None, 0, 0.4]),
                }
            ),
            max_size=3,
        ),
        "slowdowns": st.lists(
            st.fixed_dictionaries(
                {"at_s": times, "for_s": st.sampled_from([0.2, 1.0]), "factor": st.sampled_from([0.5, 1.37, 8])}
            ),
            max_size=2,
        ),
        "mtbf_s": st.sampled_from([0.7, 5.0]),
        "recovery_s": st.sampled_from([0.0, 0.5]),
    },
)
scalers = st.fixed_dictionaries(
    {
        "metric": st.sampled_from(["queue", "kv"]),
        "target": st.sampled_from([0.05, 0.5]),
        "max_replicas": st.integers(2, 6),
        "interval_s": st.sampled_from([0.1, 0.25]),
        "cold_start_s": st.sampled_from([0, 0.3]),
        "cooldown_s": st.sampled_from([0, 0.6]),
        "pool": pool_names,
    }
)


overrides = st.sampled_from(
    [{}, {"policy": "prefill-first"}, {"scheduler": {"num_blocks": 80, "block_size": 8, "max_model_len": 600}}]
)


@st.composite
def fleets(draw):
    speed = draw(st.sampled_from([1, 0.7]))
    other = {"name": "b", "replicas": draw(st.integers(0, 2)), "speed": speed, "deployment": draw(overrides)}
    fleet = {
        "pools": [{"name": "a", "replicas": draw(st.integers(1, 3))}, other],
        "router": draw(st.sampled_from(sorted(ROUTERS))),
        "admission": draw(admissions),
        "failures": draw(failures),
    }
    if draw(st.booleans()):
        fleet["autoscaler"] = draw(scalers)
    return fleet


@given(
    fleet=fleets(),
    seed=st.integers(0, 1000),
    rate=st.sampled_from([10.0, 60.0]),
    blocks=st.sampled_from([70, 2000]),
    concurrency=st.sampled_from([None, 6]),
    overlapped=st.booleans(),
)
@SHORT
def test_a_fleet_leaps_exactly_and_loses_nobody(fleet, seed, rate, blocks, concurrency, overlapped):
    offered = poisson(60, rate, seed)
    settings = {"num_blocks": blocks, "max_num_seqs": 12, "concurrency": concurrency, "async_scheduling": overlapped}
    leapt, stepped = (FleetRun(fleet, offered, leaps=leaps, **settings) for leaps in (True, False))
    for run in (leapt, stepped):
        assert_everything_is_accounted_for(run, offered)
    assert leapt.done == stepped.done
    assert leapt.lives == stepped.lives
    assert leapt.requests.equals(stepped.requests)


@pytest.mark.parametrize("seed", range(3))
def test_keeping_steps_and_tokens_changes_nothing(seed):
    fleet = {
        "pools": [{"replicas": 3}],
        "router": "kv-aware",
        "failures": {"mtbf_s": 3, "recovery_s": 0.5},
        "admission": {"patience": {"mean_s": 0.5, "until": "finish"}},
    }
    offered = poisson(150, 60.0, seed)
    plain, kept = FleetRun(fleet, offered), FleetRun(fleet, offered, steps=True, tokens=True)
    assert plain.requests.drop(["token_times_ns"]).equals(kept.requests.drop(["token_times_ns"]))
    assert kept.steps.num_rows == kept.done.steps == plain.done.steps
    ends = {}
    for step in kept.steps.to_pylist():
        for id in step["row_ids"]:
            ends.setdefault((step["replica"], id), set()).add(step["end_ns"])
    crashed = {life["replica"]: life["ended_ns"] for life in kept.lives if life["ended_by"] == "crash"}
    assert crashed
    for step in kept.steps.to_pylist():
        assert step["end_ns"] <= crashed.get(step["replica"], step["end_ns"])
    for row in kept.rows:
        if row["status"] == "finished":
            assert set(row["token_times_ns"]) <= ends[row["replica"], row["request_id"]]
            assert len(row["token_times_ns"]) == row["output_tokens"]


def test_requests_leave_no_reference_cycles():
    """A run goes without the cycle collector, so its memory is bounded only if reference counts free what has left."""
    fleet = {
        "pools": [{"replicas": 3}],
        "admission": {"max_queued_per_replica": 4, "patience": {"mean_s": 2}, "retry": {"max_attempts": 3}},
        "failures": {"mtbf_s": 5, "recovery_s": 0.5},
    }
    FleetRun(fleet, poisson(50, 60.0), num_blocks=90)  # imports, and what is made once
    offered = poisson(2000, 60.0)
    gc.collect()
    run = FleetRun(fleet, offered, num_blocks=90)
    assert gc.isenabled() and gc.collect() < len(run.rows) / 2
