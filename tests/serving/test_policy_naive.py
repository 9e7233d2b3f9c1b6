"""Our scheduler against the naive program where the recordings show nothing: any block size, pressure and order."""

import gzip
import json
from collections import deque
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.oracles.live_conformance import COST, random_recording, with_windows
from tests.budget import examples
from tests.serving import naive_vllm
from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.kv.content import SegmentContent
from tokentwin.serving.policies.vllm import VllmScheduler
from tokentwin.serving.request import Status
from tokentwin.serving.workload import WorkloadRequest

DATA = Path(__file__).parents[1] / "data"


# Drafts are not part of the naive program: recordings alone judge them (test_conformance.py).
@pytest.mark.parametrize(
    "path",
    sorted(
        path
        for folder in ("oracle", "oracle_windows")  # of what it knows
        for path in DATA.glob(f"{folder}/*.gz")
        if "draft" not in path.name and "eagle" not in path.name
    ),
    ids=lambda p: p.name.split(".")[0],
)
def test_the_naive_program_reproduces_the_recordings(path: Path) -> None:
    recording = json.loads(gzip.decompress(path.read_bytes()))
    steps, results = naive_vllm.run(recording)
    assert [in_any_order(step) for step in steps] == [in_any_order(step) for step in recording["steps"]]
    assert results == sorted(recording["results"], key=lambda r: r["id"])


def in_any_order(step: dict[str, Any]) -> dict[str, Any]:
    """Return `step` as recordings have it, with the preempted requests in any order."""
    return step | {"pre": sorted(step["pre"])}


def ours(
    recording: dict[str, Any], shares: bool, check: bool = False, named: bool = False
) -> tuple[list[Any], list[Any]]:
    """Run our scheduler on the same requests, in a loop of a dozen lines; `named` gives blocks identities."""
    config, cost = SchedulerConfig(**recording["config"]), recording["cost"]
    to_come = deque(
        sorted(
            (
                WorkloadRequest(
                    r["id"],
                    r["arrival_ns"],
                    tuple(map(tuple, r["prompt"])),
                    r["output_len"],
                    r["priority"],
                    max_tokens=r.get("max_tokens"),
                )
                for r in recording["requests"]
            ),
            key=lambda r: (r.arrival_ns, r.id),
        )
    )
    content = SegmentContent(config.block_size) if named else None
    scheduler = VllmScheduler(config, shares_prefixes=shares, content=content)
    depth = recording.get("depth", 2 if config.async_scheduling else 1)
    steps: list[Any] = []
    results: list[Any] = []
    first: dict[int, int] = {}
    flying: deque[Any] = deque()
    now = last_end = 0
    while True:
        while to_come and to_come[0].arrival_ns <= now:
            assert scheduler.add(to_come.popleft()).status is Status.WAITING
        plan = scheduler.schedule()
        if check:
            scheduler.decodes.check()
            scheduler.pool.check(scheduler.requests.values())
            for request in scheduler.requests.values():
                request.check()
        if plan.tokens:
            rows = plan.rows()
            start = max(now, last_end)
            dt = cost["base_ns"] + cost["per_token_ns"] * plan.tokens + cost["per_pair_ps"] * plan.pairs // 1000
            last_end = start + dt
            step = {"t": now, "dt": dt, "n": {str(r.request.id): r.tokens for r in rows}}
            step["pre"] = [str(r.id) for r in plan.preempted]
            steps.append({**step, "s": start} if config.async_scheduling else step)
            flying.append((last_end, plan, [row.request for row in rows if row.samples]))
            if len(flying) < depth:
                continue
        elif plan.preempted and not flying:
            continue
        if flying:
            now, plan, sampled = flying.popleft()
            finished = scheduler.commit(plan)
            for request in sampled:
                first.setdefault(request.id, now)
            for request in finished:
                times = {"first_token_ns": first[request.id], "finish_ns": now}
                results.append({"id": request.id, **times, "prefix_hit_tokens": request.first_hit})
        elif to_come:
            now = to_come[0].arrival_ns
        else:
            assert not scheduler.requests
            assert scheduler.pool.free == scheduler.pool.total
            return steps, sorted(results, key=lambda r: r["id"])


SEEDS = st.integers(0, 2**32)


def naive(recording: dict[str, Any]) -> Any:
    """Return what the naive program decides, or None where vLLM's rules never come to an end."""
    try:
        return naive_vllm.run(recording)
    except naive_vllm.Livelock:
        return None


def check(recording: dict[str, Any], shares: bool, wanted: Any, named: bool = False) -> None:
    if wanted is None:
        with pytest.raises(UserError, match="preempt one another"):
            ours(recording, shares)
    else:
        assert ours(recording, shares, check=True, named=named) == wanted


EVERY_LOOP = pytest.mark.parametrize("overlapped", [False, True], ids=["plain", "overlapped"])
EVERY_ORDER = pytest.mark.parametrize("policy", ["fcfs", "priority"])


@EVERY_LOOP
@EVERY_ORDER
@given(seed=SEEDS)
def test_sharing_workloads_are_decided_alike(seed: int, policy: str, overlapped: bool) -> None:
    recording = random_recording(Random(f"{seed} {policy} {overlapped}"), policy, overlapped, sharing=True)
    wanted = naive(recording)
    check(recording, shares=True, wanted=wanted)
    check(recording, shares=True, wanted=wanted, named=True)


@EVERY_LOOP
@EVERY_ORDER
@given(seed=SEEDS)
def test_sliding_windows_are_decided_alike(seed: int, policy: str, overlapped: bool) -> None:
    chance = Random(f"{seed} {policy} {overlapped}")
    recording = random_recording(chance, policy, overlapped, sharing=True)
    recording["config"] = with_windows(recording["config"], chance)
    check(recording, shares=True, wanted=naive(recording))


@EVERY_LOOP
@EVERY_ORDER
@given(seed=SEEDS)
def test_finding_ones_own_blocks_decides_as_finding_anybodys(seed: int, policy: str, overlapped: bool) -> None:
    recording = random_recording(Random(f"{seed} {policy} {overlapped}"), policy, overlapped, sharing=False)
    wanted = naive(recording)
    check(recording, shares=False, wanted=wanted)
    check(recording, shares=True, wanted=wanted)


@EVERY_ORDER
@pytest.mark.parametrize("depth", [2, 4])
@examples(0.5)
@given(seed=SEEDS, sharing=st.booleans())
def test_a_pipeline_is_planned_alike(seed: int, sharing: bool, policy: str, depth: int) -> None:
    recording = random_recording(Random(f"{seed} {policy} {depth}"), policy, False, sharing) | {"depth": depth}
    check(recording, shares=sharing, wanted=naive(recording))


def test_ties_of_priority_and_arrival_go_by_the_id_as_a_string() -> None:
    """vLLM's request ids are strings."""
    requests = [
        {"id": id, "arrival_ns": 0, "prompt": [[f"u{id}", 4]], "output_len": 1, "priority": 0} for id in range(12)
    ]
    config = {"max_num_seqs": 1, "max_num_batched_tokens": 8, "policy": "priority"}
    config |= {"max_model_len": 8, "block_size": 4, "num_blocks": 9}
    recording = {"config": config, "cost": COST, "requests": requests}
    wanted = naive(recording)
    assert [list(step["n"]) for step in wanted[0]] == [[id] for id in sorted(map(str, range(12)))]
    check(recording, shares=False, wanted=wanted)
    config["policy"] = "fcfs"
    steps, _ = ours(recording, shares=False)
    assert [list(step["n"]) for step in steps] == [[str(id)] for id in range(12)]


def test_a_livelock_is_reported_not_endured() -> None:
    """Equals of priority and arrival, none of which leaves room for the others."""
    requests = [
        {"id": id, "arrival_ns": 0, "prompt": [[f"u{id}", 60]], "output_len": 60, "priority": 1} for id in range(3)
    ]
    config = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 128,
        "block_size": 4,
        "num_blocks": 32,
        "enable_prefix_caching": False,
        "scheduler_reserve_full_isl": False,
        "long_prefill_token_threshold": 4,
        "policy": "priority",
    }
    recording = {"config": config, "cost": COST, "requests": requests}
    assert naive(recording) is None
    check(recording, shares=False, wanted=None)
