"""The exact `sglang` policy on the real engine: the tokens of `vllm`, pages of 1 to 64 tokens, and exact replays."""

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("torch", reason="the engine extra is not installed")

from tokentwin.calibration.validation.decision_replay import replay_decisions
from tokentwin.realengine.engine import Engine
from tokentwin.realengine.models.weights import load_model_files
from tokentwin.realengine.replay import record
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.policies.sglang_scheduler import SglangScheduler
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.traces.recording import Recording

pytestmark = pytest.mark.engine
MS = 1_000_000
OUTPUTS = 24
DRAFTS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}
URGENT = {"policy": "priority", "forget_withdrawn": True}
# room for so few requests that some are retracted, because fewer outputs are reserved than there will be
TIGHT = {"schedule_conservativeness": 0.02, "max_num_seqs": 8, "max_num_batched_tokens": 64}


def engine_for(name: str, size: int, tokens: int, **scheduler: Any) -> Engine:
    """Return an engine with pages of `size` tokens that hold `tokens` tokens in all."""
    usual = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": size}
    config = SchedulerConfig(**{**usual, "num_blocks": 1 + tokens // size, **scheduler})
    deployment = Deployment(model="random:llama", dtype="float32", policy=name, scheduler=config)
    return Engine(deployment, load_model_files("random:llama", Path()))


def outputs(engine: Engine) -> tuple[list[list[int]], int, int]:
    """Return the outputs of 12 prompts, some of which begin alike, and the numbers of hits and preemptions."""
    chance = Random(1)
    shared = [chance.randrange(90) for _ in range(70)]
    prompts = [shared[: 35 * (n % 3)] + [chance.randrange(90) for _ in range(1 + 3 * n)] for n in range(12)]
    prompts[11] = list(prompts[8])
    waiting, sequences = list(enumerate(prompts)), []
    hits = preempted = 0
    while waiting or engine.scheduler.requests:
        for number, prompt in waiting[:3]:
            request = engine.add(
                WorkloadRequest(number, number, (("", len(prompt)),), OUTPUTS, max_tokens=OUTPUTS + 6), prompt
            )
            assert not request.reason, request.reason
            sequences.append(engine.sequences[number])
        del waiting[:3]
        if engine.has_room and (step := engine.launch()):
            hits += sum(bool(request.cached) for request in step.plan.admitted)
            preempted += len(step.plan.preempted)
            engine.scheduler.pool.check(engine.scheduler.running.values())  # type: ignore[attr-defined]
            if engine.has_room:
                continue
        engine.finish()
    while engine.finish() is not None:
        pass
    pool = engine.scheduler.pool
    pool.check([])  # type: ignore[attr-defined]
    assert pool.free == pool.total
    engine.close()
    return [sequence.outputs for sequence in sequences], hits, preempted


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    return outputs(engine_for("vllm", 16, 3200))[0]


@pytest.mark.parametrize("overlapped", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize(
    ("size", "tokens", "more"),
    [
        (1, 170, TIGHT),
        (4, 176, {**TIGHT, "schedule_policy": "lpm"}),
        (16, 192, {**TIGHT, "enable_mixed_chunk": True}),
        (64, 768, TIGHT),
        (16, 224, {**TIGHT, "enable_prefix_caching": False}),
        (1, 180, {**TIGHT, "speculative": DRAFTS}),
        (16, 208, {**TIGHT, "speculative": DRAFTS}),
    ],
    ids=["page 1", "page 4", "page 16, mixed", "page 64", "no cache", "page 1, drafts", "page 16, drafts"],
)
def test_tokens_equal_those_of_vllm(
    size: int, tokens: int, more: dict[str, Any], overlapped: bool, wanted: list[list[int]]
) -> None:
    engine = engine_for("sglang", size, tokens, async_scheduling=overlapped, **more)
    assert isinstance(engine.scheduler, SglangScheduler)
    got, hits, retracted = outputs(engine)
    assert got == wanted
    assert bool(hits) == more.get("enable_prefix_caching", True)
    assert retracted or size == 64 or "speculative" in more


def talks(in_turn: bool) -> Workload:
    """Return 40 requests: a common beginning, later turns that quote answers, limits above outputs, and hang-ups.

    If `in_turn`, four users wait for each answer and think, and their later turns are more urgent. So more urgent
    requests always come while others run, however slow the machine is.
    """
    chance = Random(4)
    requests = list[WorkloadRequest]()
    for id in range(40):
        prompt = [("system", 40), (f"user {id}", chance.randint(1, 60))]
        if id >= 20 and id % 2:
            before = requests[id - 20]
            prompt = [*before.prompt, (f"out:{before.id}", before.output_len), (f"again {id}", 9)]
        cancel_ns = (id + chance.randint(0, 50)) * MS if id % 7 == 6 else None
        length = chance.randint(1, 40)
        request = WorkloadRequest(id, id * MS, tuple(prompt), length, cancel_ns=cancel_ns, max_tokens=length + 9)
        if in_turn:
            user, turn = id % 4, id // 4
            request = replace(request, priority=9 - turn, session=f"user {user}", turn=turn, think_ns=4 * MS)
        requests.append(request)
    return Workload(requests, "talks")


@pytest.mark.parametrize("overlapped", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize(
    ("size", "tokens", "more"),
    [
        (1, 215, {"schedule_policy": "lpm"}),
        (16, 240, {"schedule_policy": "lpm"}),
        (64, 448, {"schedule_policy": "lpm"}),
        (16, 320, {"speculative": DRAFTS}),
        (4, 1600, {**URGENT, "priority_scheduling_preemption_threshold": 0, "max_num_seqs": 3}),
        (4, 240, {"schedule_policy": "random", "schedule_seed": 3, "max_num_seqs": 3}),
    ],
    ids=["page 1", "page 16", "page 64", "drafts", "preemption", "random"],
)
def test_a_run_is_reproduced_in_the_simulator(
    size: int, tokens: int, more: dict[str, Any], overlapped: bool, tmp_path: Path
) -> None:
    engine = engine_for("sglang", size, tokens, async_scheduling=overlapped, **{**TIGHT, **more})
    record(talks(in_turn="policy" in more), engine, tmp_path / "run")
    engine.close()
    recording = Recording.load(tmp_path / "run")
    replay = replay_decisions(recording)
    assert replay.exact, replay.first_difference
    assert replay.identical == replay.steps > 0 and replay.identical_requests == 40
    if "policy" in more:  # elsewhere it depends on the speed of the machine whether requests are retracted
        assert sum(row["preemptions"] for row in recording.requests.to_pylist()) > 0
