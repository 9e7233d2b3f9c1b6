"""Clients that wait for answers: conversations with think times, as a queueing network and as a trace on disk."""

from dataclasses import replace

import numpy as np
import pytest

from tests.sim.fleet_samples import MS, ONE_SLOT, FleetRun, S, assert_everything_is_accounted_for
from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.traces.formats.parquet import ParquetReader, write_parquet
from tokentwin.traces.synth import parse_spec, synthesise

STEP = TokenCost(10 * MS, 0, 0)


def conversation(session, turns, first_id, start_ns=0, think_ns=100 * MS, output=5):
    """Return the turns of a conversation in the order of their earliest arrivals."""
    return [
        WorkloadRequest(
            first_id + k,
            start_ns + k * think_ns,
            (("", 10),),
            output,
            session=session,
            turn=k,
            think_ns=think_ns if k else None,
        )
        for k in range(turns)
    ]


def test_the_next_turn_comes_a_think_time_after_the_answer():
    run = FleetRun({}, conversation("s", 4, 0), STEP)
    assert [row["arrival_ns"] for row in run.rows] == [0, 150 * MS, 300 * MS, 450 * MS]
    assert [row["finish_ns"] for row in run.rows] == [50 * MS, 200 * MS, 350 * MS, 500 * MS]
    assert [(row["session"], row["turn"]) for row in run.rows] == [("s", k) for k in range(4)]


def test_a_slow_answer_holds_the_conversation_back_and_a_quick_one_does_not_hurry_it():
    slow = FleetRun({}, conversation("s", 3, 0, think_ns=10 * MS, output=100), STEP)
    assert [row["arrival_ns"] for row in slow.rows] == [0, 1010 * MS, 2020 * MS]
    late = [replace(r, arrival_ns=r.arrival_ns + r.turn * S) for r in conversation("s", 3, 0)]
    run = FleetRun({}, late, STEP)
    assert [row["arrival_ns"] for row in run.rows] == [0, 1100 * MS, 2200 * MS]


def test_the_conversation_goes_on_after_a_turn_that_was_not_answered():
    admission = {"patience": {"mean_s": 0.2, "distribution": "constant", "until": "finish"}}
    offered = [replace(r, output_len=5 if r.turn != 1 else 100) for r in conversation("s", 3, 0)]
    run = FleetRun({"admission": admission}, offered, STEP)
    assert [row["status"] for row in run.rows] == ["finished", "cancelled", "finished"]
    assert run.rows[1]["end_ns"] == 350 * MS and run.rows[2]["arrival_ns"] == 450 * MS
    assert_everything_is_accounted_for(run, offered)


def test_a_turn_without_a_think_time_comes_by_the_clock():
    offered = [replace(r, think_ns=None) for r in conversation("s", 3, 0, think_ns=10 * MS, output=100)]
    run = FleetRun({}, offered, STEP)
    assert [row["arrival_ns"] for row in run.rows] == [0, 10 * MS, 20 * MS]


@pytest.mark.parametrize("turns", [(0, 2), (1,), (0, 0)])
def test_turns_out_of_order_are_one_line(turns):
    offered = [WorkloadRequest(i, i, (("", 1),), 1, session="s", turn=turn, think_ns=1) for i, turn in enumerate(turns)]
    with pytest.raises(UserError) as error:
        FleetRun({}, offered, STEP)
    assert "turn" in str(error.value) and "\n" not in str(error.value)


def test_users_who_think_and_wait_are_the_machine_repairman():
    """M/M/1//N: N users think (mean Z), then wait for one server (mean E[S]); exact state probabilities.

    P_n in proportion to N! / (N - n)! * (E[S] / Z)^n; throughput (1 - P_0) / E[S] (Kleinrock 1975, section 3.8).
    """
    users, turns, mean_tokens, think_ms = 6, 3000, 1000, 4.0
    rng = np.random.default_rng(2)
    offered = []
    for user in range(users):
        thinks = rng.exponential(think_ms * MS, turns).astype(int)
        earliest = np.cumsum(thinks)
        sizes = rng.geometric(1 / mean_tokens, turns)
        offered += [
            WorkloadRequest(
                0,
                int(earliest[k]),
                (("", int(sizes[k])),),
                1,
                session=f"u{user}",
                turn=k,
                think_ns=int(thinks[k]) if k else None,
            )
            for k in range(turns)
        ]
    offered.sort(key=lambda r: (r.arrival_ns, r.session))
    offered = [replace(r, id=id) for id, r in enumerate(offered)]
    run = FleetRun({}, offered, TokenCost(0, 1000, 0), **ONE_SLOT)
    weights = [1.0]
    for n in range(users):
        weights.append(weights[-1] * (users - n) / think_ms)
    throughput_per_ms = 1 - weights[0] / sum(weights)
    until = min(max(row["end_ns"] for row in run.rows if row["session"] == f"u{u}") for u in range(users))
    served = sum(row["end_ns"] <= until for row in run.rows)
    assert served / (until / MS) == pytest.approx(throughput_per_ms, rel=0.02)
    # and by Little's law a turn takes N / X - Z
    sojourn = np.mean([row["end_ns"] - row["arrival_ns"] for row in run.rows if row["end_ns"] <= until])
    assert sojourn / MS == pytest.approx(users / throughput_per_ms - think_ms, rel=0.04)


# Traces of conversations

SPEC = {
    "requests": 300,
    "seed": 4,
    "arrivals": {"kind": "poisson", "rate": 5},
    "prompt": 40,
    "output": {"kind": "exponential", "mean": 30},
    "sessions": {"turns": {"kind": "exponential", "mean": 4}, "think_ms": {"kind": "exponential", "mean": 500}},
}


def synthetic(think_from):
    return list(synthesise(parse_spec(SPEC | {"sessions": SPEC["sessions"] | {"think_from": think_from}})).requests)


def test_synthetic_conversations_can_wait_for_their_answers():
    from_arrival, from_answer = synthetic("arrival"), synthetic("answer")
    assert [replace(r, think_ns=None) for r in from_answer] == from_arrival
    last = {}
    for request in from_answer:
        before = last.get(request.session)
        assert request.turn == (0 if before is None else before.turn + 1)
        assert request.think_ns == (None if before is None else request.arrival_ns - before.arrival_ns)
        last[request.session] = request
    run = FleetRun(
        {"pools": [{"replicas": 2}], "router": "session-sticky"}, from_answer, max_model_len=16384, shares_prefixes=True
    )
    end = {(row["session"], row["turn"]): row["end_ns"] for row in run.rows}
    for request, row in zip(from_answer, run.rows, strict=True):
        if request.turn:
            assert row["arrival_ns"] == end[request.session, request.turn - 1] + request.think_ns


def test_a_trace_keeps_its_conversations(tmp_path):
    requests = synthetic("answer")
    write_parquet(Workload(requests), tmp_path / "trace.parquet")
    assert list(ParquetReader().read(tmp_path / "trace.parquet").requests) == requests


def test_an_older_trace_has_no_conversations(tmp_path):
    import pyarrow.parquet as pq

    requests = [WorkloadRequest(i, i, (("", 3),), 2, session="s", turn=i) for i in range(3)]
    write_parquet(Workload(requests), tmp_path / "new.parquet")
    table = pq.read_table(tmp_path / "new.parquet").drop(["session", "turn", "think_ns"])
    pq.write_table(table, tmp_path / "old.parquet")
    read = list(ParquetReader().read(tmp_path / "old.parquet").requests)
    assert read == [replace(r, session="", turn=0) for r in requests]
