"""Rung 1 in the overlapped loop: every decision follows from the times at which steps were planned."""

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.budget import examples
from tokentwin.calibration.validation.decision_replay import GivenTimes, replay_decisions
from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.sim.cluster import simulate_to
from tokentwin.traces.recording import Recording
from tokentwin.traces.synth import parse_spec, synthesise

TIGHT = {"num_blocks": 60, "scheduler_reserve_full_isl": False}


def traffic(seed: int, rate: float, requests: int = 60) -> Workload:
    spec = {
        "name": "x",
        "seed": seed,
        "requests": requests,
        "arrivals": {"kind": "poisson", "rate": rate},
        "prompt": {"kind": "lognormal", "mean": 40, "sigma": 0.8, "max": 150},
        "output": {"kind": "lognormal", "mean": 12, "sigma": 0.8, "max": 60},
    }
    return synthesise(parse_spec(spec, where="x"))


def config(**more: Any) -> SchedulerConfig:
    usual = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256, "num_blocks": 200, "block_size": 4}
    return SchedulerConfig(**{**usual, **more})


@examples(0.15)
@given(
    seed=st.integers(0, 1000),
    rate=st.sampled_from([5.0, 60.0, 400.0]),
    overlapped=st.booleans(),
    plan_ns=st.sampled_from([0, 40_000, 900_000]),
    more=st.sampled_from([{}, TIGHT, {**TIGHT, "policy": "priority"}, {"max_num_batched_tokens": 16}]),
)
def test_a_simulated_run_is_reproduced_from_its_planning_times(seed, rate, overlapped, plan_ns, more, tmp_path):
    """Steps of other lengths than planning takes, and planning that takes longer than steps."""
    deployment = Deployment(scheduler=config(async_scheduling=overlapped, **more))
    cost = TokenCost(300_000, 5_000, 2_000, plan_ns)
    simulate_to(tmp_path / "run", traffic(seed, rate), deployment, cost, tokens=True, overwrite=True)
    replay = replay_decisions(Recording.load(tmp_path / "run"))
    assert replay.exact, replay.first_difference
    assert replay.identical == replay.steps > 0


def test_ends_are_where_the_next_plans_need_them() -> None:
    plans, in_flight = [0, 5, 100, 200, 350], [0, 1, 1, 1, 0]
    times = GivenTimes(plans, in_flight, 400)
    ends, free = [], 0
    for number, planned in enumerate(plans):
        start = max(planned + times._cpu_ns[number], free)
        free = start + times._step_ns[number]
        ends.append(free)
    assert ends[:4] == [100, 200, 349, 350]
    assert ends[4] >= 400
    assert times._cpu_ns == [5, 0, 0, 0, 0]


@pytest.mark.engine
@pytest.mark.parametrize("more", [{}, TIGHT, {**TIGHT, "policy": "priority", "forget_withdrawn": True}])
def test_an_overlapped_run_of_the_engine_is_reproduced(more: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the engine extra is not installed")
    from tokentwin.realengine.engine import Engine
    from tokentwin.realengine.models.weights import load_model_files
    from tokentwin.realengine.replay import record

    deployment = Deployment(model="random:llama", dtype="float32", scheduler=config(async_scheduling=True, **more))
    engine = Engine(deployment, load_model_files("random:llama", Path()))
    record(traffic(2, 400.0), engine, tmp_path / "run")
    engine.close()
    recording = Recording.load(tmp_path / "run")
    replay = replay_decisions(recording)
    assert replay.exact, replay.first_difference
    assert replay.identical_requests == 60
    assert set(recording.steps["in_flight"].to_pylist()) == {0, 1}


MS = 1_000_000


def chats(seed: int, gap_ms: float, requests: int = 24) -> Workload:
    """Some hang up, some answer with a stop token, some are cut by their limit, and some hear a stop string."""
    chance = Random(seed)
    chats, at_ns = [], 0
    for id in range(requests):
        at_ns += round(chance.uniform(0.5, 1.5) * gap_ms * MS)
        chat = WorkloadRequest(id, at_ns, (("system", 20), (f"u{id}", chance.randint(1, 40))), chance.randint(1, 60))
        gone_ns = at_ns + round(chance.uniform(0, 40) * MS)
        how = id % 4
        if how == 0:
            chat = replace(chat, cancel_ns=gone_ns, output_len=150)
        elif how == 1:
            chat = replace(chat, stop_ns=gone_ns, output_len=150)
        elif how == 2:
            chat = replace(chat, max_tokens=chat.output_len + chance.choice([0, 1, 2, 90]))
        chats.append(chat)
    return Workload(chats, "chats")


@pytest.mark.engine
@pytest.mark.parametrize("overlapped", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize("gap_ms", [2.0, 60.0], ids=["busy", "idle"])
@pytest.mark.parametrize("more", [{"num_blocks": 400}, TIGHT], ids=["roomy", "tight"])
def test_real_chats_are_reproduced(overlapped: bool, gap_ms: float, more: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the engine extra is not installed")
    from tokentwin.realengine.engine import Engine
    from tokentwin.realengine.models.weights import load_model_files
    from tokentwin.realengine.replay import record

    deployment = Deployment(
        model="random:llama", dtype="float32", scheduler=config(async_scheduling=overlapped, **more)
    )
    engine = Engine(deployment, load_model_files("random:llama", Path()))
    record(chats(3, gap_ms), engine, tmp_path / "run")
    engine.close()
    recording = Recording.load(tmp_path / "run")
    replay = replay_decisions(recording)
    assert replay.exact, replay.first_difference
    assert replay.identical_requests == 24
    rows = recording.requests.to_pylist()
    assert {row["status"] for row in rows} >= {"finished", "cancelled"}
    assert all((row["steps_before_end"] is None) == (row["status"] == "finished" and not row["reason"]) for row in rows)


@examples(0.15)
@given(
    seed=st.integers(0, 1000),
    gap_ms=st.sampled_from([1.0, 8.0, 60.0]),
    overlapped=st.booleans(),
    plan_ns=st.sampled_from([0, 40_000, 900_000]),
    more=st.sampled_from([{"num_blocks": 400}, TIGHT, {**TIGHT, "policy": "priority"}]),
)
def test_simulated_chats_are_reproduced_from_their_planning_times(seed, gap_ms, overlapped, plan_ns, more, tmp_path):
    deployment = Deployment(scheduler=config(async_scheduling=overlapped, **more))
    cost = TokenCost(1_000_000, 5_000, 2_000, plan_ns)
    simulate_to(tmp_path / "run", chats(seed, gap_ms), deployment, cost, tokens=True, overwrite=True)
    replay = replay_decisions(Recording.load(tmp_path / "run"))
    assert replay.exact, replay.first_difference
