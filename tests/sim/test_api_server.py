"""Clients before an API server on the virtual clock: by hand, in line, and without a gap in anybody's time."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.deployments.fleet import AdmissionConfig, FleetConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.front_door import FrontDoor
from tokentwin.serving.workload import PRIVATE, Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink
from tokentwin.traces.metrics.run_metrics import SERVED_METRICS, RunMetrics

US, MS = 1000, 1_000_000
DOOR = FrontDoor(
    client_ns=2 * MS, request_ns=300 * US, prompt_token_ns=10 * US, outputs_ns=50 * US, chunk_ns=70 * US, last_ns=9 * US
)
TIMES = ("arrival_ns", "first_token_ns", "finish_ns", "end_ns", "token_times_ns")
COST = TokenCost(5 * MS, 10 * US, 1000)


def requests(count: int, every_ns: int = 3 * MS, **about: Any) -> Workload:
    return Workload([WorkloadRequest(at, at * every_ns, ((PRIVATE, 20),), 4 + at % 5, **about) for at in range(count)])


def simulated(workload: Workload, door: FrontDoor | None, **settings: Any) -> tuple[list[dict[str, Any]], ...]:
    """Return the rows of requests as the server has them and as clients have them, and the rows of steps."""
    server, clients = TableSink(), TableSink()
    deployment = settings.pop("deployment", Deployment(scheduler=SchedulerConfig(max_num_seqs=8, num_blocks=500)))
    settings = {"tokens": True} | settings
    Cluster(deployment, COST, server, front_door=door, clients=clients, **settings).run(workload)
    tables = server.requests.sort_by("request_id"), clients.requests.sort_by("request_id"), server.steps
    return tuple(table.to_pylist() for table in tables)


def test_one_request_by_hand() -> None:
    (served,), (seen,), _ = simulated(requests(1), DOOR)
    engine = simulated(requests(1), None)[0][0]
    sent = served["received_ns"] - 2 * MS
    assert (sent, seen["arrival_ns"]) == (0, 0)
    assert served["arrival_ns"] - served["received_ns"] == 300 * US + 20 * 10 * US
    later = served["arrival_ns"]
    assert served["token_times_ns"] == [at + later for at in engine["token_times_ns"]]
    texts = [at + 120 * US for at in served["token_times_ns"]]
    assert (served["first_text_ns"], served["last_text_ns"]) == (texts[0], texts[-1])
    assert served["last_sent_ns"] == texts[-1] + 9 * US
    assert (seen["token_times_ns"], seen["first_token_ns"], seen["finish_ns"]) == (texts, texts[0], texts[-1])


def test_a_free_front_door_changes_nothing() -> None:
    behind, seen, steps = simulated(requests(30), FrontDoor())
    alone, _, steps_alone = simulated(requests(30), None)
    assert steps == steps_alone
    added = ("received_ns", "first_text_ns", "first_sent_ns", "last_text_ns", "last_sent_ns", "client_ns")
    assert [{**row, **dict.fromkeys(added)} for row in behind] == alone
    for row, client in zip(behind, seen, strict=True):
        assert [row[name] for name in added] == [
            row["arrival_ns"], *[row["first_token_ns"]] * 2, *[row["finish_ns"]] * 2, 0
        ]  # fmt: skip
        assert client["token_times_ns"] == row["token_times_ns"]


def test_work_is_done_in_line() -> None:
    served, _, _ = simulated(requests(6, every_ns=0), DOOR)
    arrivals = sorted(row["arrival_ns"] for row in served)
    assert np.diff(arrivals).tolist() == [500 * US] * 5
    texts = sorted(row["first_text_ns"] for row in served)
    assert min(np.diff(texts)) >= 70 * US


def test_a_closed_loop_sends_when_the_client_has_its_answer() -> None:
    served, seen, _ = simulated(replace(requests(5, every_ns=0), concurrency=1), DOOR)
    for before, after in zip(served, seen[1:], strict=False):
        assert after["arrival_ns"] == before["last_sent_ns"]


@pytest.mark.parametrize("block", [1, 4096])
def test_what_a_client_sees_adds_up_and_every_request_has_its_row(block: int) -> None:
    workload = requests(40, every_ns=MS)
    listed = list(workload.requests)
    listed[7] = replace(listed[7], cancel_ns=30 * MS)
    fleet = FleetConfig(admission=AdmissionConfig(max_queued=10))
    deployment = Deployment(scheduler=SchedulerConfig(max_num_seqs=4, num_blocks=500))
    served, seen, _ = simulated(
        replace(workload, requests=listed), DOOR, fleet=fleet, deployment=deployment, block=block
    )
    statuses = [row["status"] for row in served]
    assert len(served) == len(seen) == 40 and {"finished", "rejected", "cancelled"} == set(statuses)
    for row, client in zip(served, seen, strict=True):
        assert client["status"] == row["status"]
        if row["status"] == "finished":
            inside = row["last_sent_ns"] - row["received_ns"]
            assert inside + row["client_ns"] == client["finish_ns"] - client["arrival_ns"]
        else:
            assert row["last_sent_ns"] is None and client["finish_ns"] is None


def test_the_metrics_add_up_to_what_clients_saw() -> None:
    server, clients = TableSink(), TableSink()
    Cluster(Deployment(), COST, server, tokens=True, front_door=DOOR, clients=clients).run(requests(30))
    inside, outside = (
        RunMetrics(server.requests.sort_by("request_id")),
        RunMetrics(clients.requests.sort_by("request_id")),
    )
    parts = sum(inside.values(name) for name in ("queue_ms", "prefill_ms", "decode_ms", *SERVED_METRICS))
    assert parts == pytest.approx(outside.values("e2e_ms"))


def test_an_engine_beside_an_api_process_is_slower_by_steps_and_tokens() -> None:
    door = FrontDoor(engine_step_ns=400 * US, engine_row_ns=30 * US)
    _, _, slow = simulated(requests(1), door)
    _, _, fast = simulated(requests(1), None)
    more = [s["end_ns"] - s["start_ns"] - (f["end_ns"] - f["start_ns"]) for s, f in zip(slow, fast, strict=True)]
    assert more == [400 * US + 30 * US * step["sampled_rows"] for step in fast]


def test_behind_a_learnt_front_door_rows_have_the_times_of_clients() -> None:
    learnt = DOOR.model_copy(update={"learnt": True})
    rows, seen, _ = simulated(requests(30), learnt)
    _, clients, _ = simulated(requests(30), DOOR)
    for row, client in zip(rows, clients, strict=True):
        assert {name: row[name] for name in TIMES} == {name: client[name] for name in TIMES}
        assert row["received_ns"] is None and row["scheduled_ns"] > row["arrival_ns"] == row["send_ns"]
    assert seen == clients
    short, _, _ = simulated(requests(30), learnt, tokens=False)
    assert [row["finish_ns"] for row in short] == [row["finish_ns"] for row in rows]
    assert short[0]["token_times_ns"] is None


def test_each_engine_may_have_an_api_process_of_its_own() -> None:
    for own, processes in ((False, 1), (True, 3)):
        door = FrontDoor(request_ns=2 * MS, own_processes=own)
        rows, _, _ = simulated(requests(6, every_ns=0), door, replicas=3)
        reached = sorted(row["queued_ns"] for row in rows)
        assert reached == [2 * MS * (1 + at // processes) for at in range(6)]


@pytest.mark.parametrize("concurrency", [None, 3])
def test_texts_without_a_queue_are_the_same_in_leaps(concurrency: int | None) -> None:
    """A piece of work of 1e-9 ns makes texts queue, but takes no time."""
    door = FrontDoor(client_ns=2 * MS, request_ns=40 * US, outputs_ns=50 * US, last_ns=9 * US, learnt=True)
    workload = replace(requests(40, every_ns=5 * MS), concurrency=concurrency)
    for tokens in (True, False):
        in_leaps, _, _ = simulated(workload, door, tokens=tokens, steps=False)
        queued, _, _ = simulated(workload, door.model_copy(update={"chunk_ns": 1e-9}), tokens=tokens)
        assert in_leaps == queued
    quick = DOOR.without_queue()
    assert (quick.chunk_ns, quick.outside_ms) == (0, DOOR.outside_ms)


def test_a_file_comes_back_and_another_is_refused(tmp_path: Any) -> None:
    DOOR.save(tmp_path)
    assert FrontDoor.load(tmp_path) == FrontDoor.load(tmp_path / "front_door.json") == DOOR
    (tmp_path / "other.json").write_text('{"chunk_ns": -1}')
    for path in (tmp_path / "other.json", tmp_path / "none.json"):
        with pytest.raises(UserError, match="make one with calibrate --from-served"):
            FrontDoor.load(path)
