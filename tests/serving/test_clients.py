"""Clients that wait for answers, as plain data; they behave the same in real and simulated time."""

from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentwin.calibration.validation.decision_replay import replay_decisions
from tokentwin.serving.clients import Clients
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.traces.recording import Recording

MS = 1_000_000


def served(workload: Workload, service_ns: dict[int, int]) -> tuple[dict[int, int], dict[int, int], int]:
    """Return arrivals and ends by id, behind unlimited servers, and the maximum number of requests at once."""
    clients = Clients(workload)
    arrivals: dict[int, int] = {}
    ends: dict[int, int] = {}
    under_way: list[tuple[int, int, WorkloadRequest]] = []
    most = 0
    while not clients.exhausted or under_way:
        next_ns = clients.next_ns
        if next_ns is not None and (not under_way or next_ns < under_way[0][0]):
            request = clients.pop()
            assert request.id not in arrivals
            arrivals[request.id] = request.arrival_ns
            assert request.arrival_ns == next_ns
            heappush(under_way, (next_ns + service_ns[request.id], request.id, request))
            most = max(most, len(under_way))
        else:
            now, _, request = heappop(under_way)
            ends[request.id] = now
            clients.ended(request, now)
    return arrivals, ends, most


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    requests, turns = [], dict.fromkeys("ab", 0)
    arrival = 0
    for id in range(draw(st.integers(1, 25))):
        arrival += draw(st.integers(0, 9))
        session = draw(st.sampled_from(["", "a", "b"]))
        turn = turns.get(session, 0)
        think = draw(st.none() | st.integers(0, 20)) if session else None
        requests.append(WorkloadRequest(id, arrival, (("", 1),), 1, session=session, turn=turn, think_ns=think))
        if session:
            turns[session] += 1
    return Workload(requests, concurrency=draw(st.none() | st.integers(1, 4)))


@given(workload=workloads(), data=st.data())
def test_everybody_comes_once_and_nobody_before_what_they_wait_for(workload: Workload, data: st.DataObject) -> None:
    requests = list(workload.requests)
    service = {request.id: data.draw(st.integers(1, 30)) for request in requests}
    arrivals, ends, most = served(workload, service)
    assert arrivals.keys() == ends.keys() == {request.id for request in requests}
    if workload.concurrency is not None:
        assert most <= workload.concurrency
    before: dict[str, WorkloadRequest] = {}
    for request in requests:
        earliest = request.arrival_ns
        if request.session and request.turn and request.think_ns is not None:
            earliest = max(earliest, ends[before[request.session].id] + request.think_ns)
        if workload.concurrency is None:
            assert arrivals[request.id] == earliest
        else:
            assert arrivals[request.id] >= earliest
        before[request.session] = request


def test_in_a_closed_loop_each_end_lets_the_next_one_in() -> None:
    workload = Workload([WorkloadRequest(id, 0, (("", 1),), 1) for id in range(6)], concurrency=2)
    arrivals, ends, _ = served(workload, {0: 10, 1: 4, 2: 4, 3: 4, 4: 1, 5: 1})
    assert arrivals == {0: 0, 1: 0, 2: 4, 3: 8, 4: 10, 5: 11}
    assert ends == {0: 10, 1: 4, 2: 8, 3: 12, 4: 11, 5: 12}


def test_a_repeated_run_waits_for_nobody() -> None:
    requests = [WorkloadRequest(id, 0, (("", 1),), 1, session="s", turn=id, think_ns=5) for id in range(3)]
    clients = Clients(Workload(requests), offered_ns={0: 7, 1: 7, 2: 9})
    assert [(clients.next_ns, clients.pop()) for _ in range(3)] == list(zip([7, 7, 9], requests, strict=True))
    assert clients.exhausted and clients.next_ns is None


def conversations(concurrency: int | None) -> Workload:
    """Return four conversations of three turns; each turn's prompt is the conversation so far."""
    requests = []
    for turn in range(3):
        for user in range(4):
            id = 4 * turn + user
            history = [(f"out:{id - 4 * back}", 12) for back in range(turn, 0, -1)]
            questions = [(f"u{user}t{t}", 20) for t in range(turn + 1)]
            prompt = (*(part for pair in zip(questions, history, strict=False) for part in pair), questions[-1])
            think = (3 + user) * MS if turn else None
            requests.append(
                WorkloadRequest(id, (user + turn) * MS, prompt, 12, -user, session=str(user), turn=turn, think_ns=think)
            )
    requests.sort(key=lambda request: (request.arrival_ns, request.id))
    return Workload(requests, "conversations", concurrency)


@pytest.mark.engine
@pytest.mark.parametrize("concurrency", [None, 3])
@pytest.mark.parametrize("policy", ["vllm", "priority-ageing", "edf"])
def test_users_of_the_engine_read_and_think(policy: str, concurrency: int | None, tmp_path: Path) -> None:
    """What comes when is exact on the wall clock too, and every decision follows from it."""
    pytest.importorskip("torch", reason="the engine extra is not installed")
    from tokentwin.realengine.engine import Engine
    from tokentwin.realengine.models.weights import load_model_files
    from tokentwin.realengine.replay import record

    limits: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 256, "num_blocks": 80}
    config = SchedulerConfig(**limits, block_size=4, ageing_s=0.004, edf_ttft_ms={"chat": 50})
    deployment = Deployment(model="random:llama", dtype="float32", policy=policy, scheduler=config)
    engine = Engine(deployment, load_model_files("random:llama", Path()))
    workload = conversations(concurrency)
    record(workload, engine, tmp_path / "run")
    engine.close()
    recording = Recording.load(tmp_path / "run")
    columns = ["request_id", "session", "turn", "arrival_ns", "finish_ns", "send_ns"]
    rows = {row["request_id"]: row for row in recording.table("requests", columns).to_pylist()}
    assert len(rows) == 12
    for request in workload.requests:
        row = rows[request.id]
        assert (row["session"], row["turn"]) == (request.session, request.turn)
        assert row["send_ns"] >= row["arrival_ns"]
        if request.turn:
            answered_ns = rows[request.id - 4]["finish_ns"] + (request.think_ns or 0)
            assert row["arrival_ns"] >= answered_ns
            if concurrency is None:
                assert row["arrival_ns"] == max(answered_ns, request.arrival_ns)
    replay = replay_decisions(recording)
    assert replay.exact, replay.first_difference
    assert replay.identical_requests == 12
