"""KV in host memory: the same answers as without, the same decisions as the simulator's, and every copy recorded."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from tests.budget import examples  # noqa: E402
from tokentwin.calibration.kv_link import as_linked  # noqa: E402
from tokentwin.calibration.validation.decision_replay import replay_decisions  # noqa: E402
from tokentwin.realengine.engine import Engine  # noqa: E402
from tokentwin.realengine.models.weights import load_model_files  # noqa: E402
from tokentwin.realengine.replay import record  # noqa: E402
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig  # noqa: E402
from tokentwin.serving.deployments.kv_tiers import KvTier, KvTiersConfig  # noqa: E402
from tokentwin.serving.errors import UserError  # noqa: E402
from tokentwin.serving.workload import Workload, WorkloadRequest  # noqa: E402
from tokentwin.traces.recording import Recording  # noqa: E402
from tokentwin.traces.recording_writer import RecordingWriter  # noqa: E402

pytestmark = pytest.mark.engine

BLOCK = 4
BLOCK_GIB = 8 * 1024 / 1024**3  # more than a block of the model takes

ASYNC = {"async_scheduling": True}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
MODEL = {"model": "random:llama", "num_speculative_tokens": 2}  # the target itself: nearly all is accepted

DISK = KvTier(name="disk", capacity_gib=1, read_gb_s=1, write_gb_s=1)


def tiers(blocks: float = 200, **more: Any) -> KvTiersConfig:
    tier = KvTier(name="cpu", capacity_gib=blocks * BLOCK_GIB, read_gb_s=10, write_gb_s=10)
    return KvTiersConfig(tiers=(tier,), **more)


def deployed(num_blocks: int = 40, kv_tiers: KvTiersConfig | None = None, **scheduler: Any) -> Deployment:
    usual = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "max_model_len": 128, "block_size": BLOCK}
    config = SchedulerConfig(**{**usual, "num_blocks": num_blocks, "scheduler_reserve_full_isl": False, **scheduler})
    return Deployment(model="random:llama", dtype="float32", scheduler=config, kv_tiers=kv_tiers)


def engine(deployment: Deployment) -> Engine:
    drafts = deployment.scheduler.speculative
    draft = drafts and drafts.model and load_model_files(drafts.model, Path())
    return Engine(deployment, load_model_files("random:llama", Path()), draft or None)


def talk(seed: int, users: int = 6, turns: int = 3) -> Workload:
    """Return conversations that begin alike, with more KV than there are blocks."""
    draw, requests = random.Random(seed), []
    for turn in range(turns):
        for user in range(users):
            number = turn * users + user
            questions = [(f"u{user}t{t}", 9 + (user + t) % 5) for t in range(turn + 1)]
            answers = [(f"out:{number - users * back}", 8) for back in range(turn, 0, -1)]
            prompt = (("system", 8), *(part for pair in zip(questions, answers, strict=False) for part in pair))
            think = draw.randrange(1, 8) * 1_000_000 if turn else None
            at_ns = (6 * turn + draw.randrange(5)) * 1_000_000
            prompt = (*prompt, questions[-1])
            requests.append(WorkloadRequest(number, at_ns, prompt, 8, session=str(user), turn=turn, think_ns=think))
    requests.sort(key=lambda request: (request.arrival_ns, request.id))
    return Workload(requests, "talk")


def outputs(engine: Engine, seed: int) -> dict[int, list[int]]:
    """Return outputs for prompts with common beginnings; some return when their KV has long been evicted."""
    draw = random.Random(seed)
    said = {}
    prompts = [[draw.randrange(500) for _ in range(draw.randrange(4, 40))] for _ in range(6)]
    waiting = [prompts[draw.randrange(6)][: draw.randrange(3, 40)] for _ in range(16)]
    for number, prompt in enumerate(waiting):
        engine.add(WorkloadRequest(number, number, (("", len(prompt)),), 12), prompt)
        said[number] = engine.sequences[number]
        for _ in range(draw.randrange(4)):
            engine.step()
        if draw.random() < 0.2:
            engine.abort(draw.randrange(number + 1))
        assert engine.tier is None or engine.tier.check() is None
    while engine.scheduler.requests:
        engine.step()
    return {number: list(sequence.outputs) for number, sequence in said.items()}


@examples(0.06)
@given(
    seed=st.integers(0, 1000),
    blocks=st.sampled_from([34, 40, 60]),
    room=st.sampled_from([1.5, 12, 200]),
    preemption=st.sampled_from(["swap", "recompute"]),
    overlapped=st.booleans(),
    drafts=st.sampled_from([None, NGRAM, MODEL]),
)
def test_outputs_are_those_without_a_tier(seed, blocks, room, preemption, overlapped, drafts):
    said = []
    for kv_tiers, speculative in ((None, None), (tiers(room, preemption=preemption), drafts)):
        made = engine(deployed(blocks, kv_tiers, async_scheduling=overlapped, speculative=speculative))
        said.append(outputs(made, seed))
        made.close()
    finished = [number for number, output in said[0].items() if len(output) == len(said[1][number]) == 12]
    assert len(finished) > 6
    for number in finished:
        assert said[0][number] == said[1][number]


# Any two of them in every combination. Fewer blocks than the engine has, and all that there are
WAYS = [
    (None, False, "swap", 20),
    (None, True, "recompute", 200),
    (NGRAM, False, "recompute", 200),
    (NGRAM, True, "swap", 200),
    (NGRAM, True, "recompute", 20),
    (MODEL, False, "swap", 200),
    (MODEL, True, "recompute", 20),
]


@pytest.mark.parametrize(("drafts", "overlapped", "preemption", "room"), WAYS)
def test_every_decision_is_made_again(drafts, overlapped, preemption, room, tmp_path):
    made = engine(deployed(36, tiers(room, preemption=preemption), async_scheduling=overlapped, speculative=drafts))
    workload = talk(1)
    workload = replace(
        workload, requests=[replace(r, output_len=30 if r.id % 5 == 0 else 8) for r in workload.requests]
    )
    record(workload, made, tmp_path / "run")
    made.close()
    recording = Recording.load(tmp_path / "run")
    replay = replay_decisions(recording)
    assert replay.exact, replay.first_difference
    assert replay.identical_requests == replay.requests == 18
    requests = recording.requests.to_pylist()
    accepted = sum(r["accepted_tokens"] or 0 for r in requests)
    assert (accepted > 5) == (drafts is not None)
    if drafts is MODEL:  # whose KV comes back, too. Overlapped, each request's last step verifies two more
        assert accepted + 36 * overlapped > 0.95 * sum(r["draft_tokens"] for r in requests)
    hits = sum(dict(r["tier_hit_tokens"]).get("cpu", 0) for r in requests)
    swapped = sum(r["swapped_in_tokens"] for r in requests)
    assert (hits > 0) >= (room == 200) and (swapped > 0) <= (preemption == "swap")
    transfers = [one for row in recording.steps["kv_transfers"].to_pylist() for one in row]
    assert {one["reads"] for one in transfers} == ({True, False} if hits + swapped else {False})
    assert all(one["submitted_ns"] <= one["began_ns"] <= one["ended_ns"] for one in transfers)
    read = sum(one["size_bytes"] for one in transfers if one["reads"])
    learnt = as_linked(made.deployment, [recording]).kv_tiers
    assert learnt != made.deployment.kv_tiers and learnt.preemption == preemption
    assert read == (hits + swapped) * made.deployment.kv_tiers.kv_bytes_per_token


def test_two_ranks_keep_their_shares_in_host_memory(tmp_path: Path) -> None:
    alone = engine(deployed(36))
    wanted = outputs(alone, 5)
    alone.close()
    made = engine(deployed(36, tiers(60), async_scheduling=True).model_copy(update={"tensor_parallel_size": 2}))
    try:
        assert made.deployment.kv_tiers.kv_bytes_per_token == 2 * made.runner.kv.block_bytes // BLOCK
        said = outputs(made, 5)
        assert sum(said[number] == wanted[number] for number in wanted if len(said[number]) == 12) > 6
        assert all(said[number] == output for number, output in wanted.items() if len(output) == len(said[number]))
        record(talk(1), made, tmp_path / "run")
    finally:
        made.close()
    recording = Recording.load(tmp_path / "run")
    replay = replay_decisions(recording)
    assert replay.exact, replay.first_difference
    assert sum(dict(row["tier_hit_tokens"]).get("cpu", 0) for row in recording.requests.to_pylist()) > 0


def test_a_link_is_learnt_from_its_copies(tmp_path: Path) -> None:
    """Copies of which latency and bandwidths are known, in a recording like the engine's."""

    def copy(reads: bool, size_bytes: int) -> dict[str, Any]:
        took_ns = 20_000 + size_bytes / (5 if reads else 2)  # GB/s are bytes/ns
        return {"reads": reads, "size_bytes": size_bytes, "submitted_ns": 0, "began_ns": 10, "ended_ns": 10 + took_ns}

    run = {"run_id": "run", "clock": "wall", "replicas": 1}
    with RecordingWriter(tmp_path / "run", run) as writer:
        for size in (10_000, 80_000, 500_000):
            writer.add_step(replica=0, step=size, kv_transfers=[copy(True, size), copy(False, size)])
    learnt = as_linked(deployed(kv_tiers=tiers()), [Recording.load(tmp_path / "run")]).kv_tiers
    assert learnt is not None
    (tier,) = learnt.tiers
    assert (tier.latency_us, tier.read_gb_s, tier.write_gb_s) == pytest.approx((20, 5, 2), rel=1e-6)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kv_tiers": KvTiersConfig(tiers=(*tiers().tiers, DISK))}, "one tier"),
        ({"kv_tiers": tiers(0.01)}, "smaller than one KV block"),
    ],
)
def test_what_it_cannot_do_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        engine(deployed(kv_tiers=tiers()).model_copy(update=change))
