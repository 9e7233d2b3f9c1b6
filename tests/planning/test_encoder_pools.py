"""Encoders on GPUs of their own in plans, prices and diagnoses."""

import pytest

from tokentwin.planning.diagnose.changes import changes
from tokentwin.planning.plan.candidates import Split, candidate_engines
from tokentwin.planning.priced_scenario import price_scenario
from tokentwin.planning.simulation import recorded
from tokentwin.serving.deployments.config import Deployment, parse
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import PRIVATE, Item, Workload, WorkloadRequest
from tokentwin.traces.recording import Recording, notes_of

SERVED = {"model": "Qwen3-VL-8B", "gpu_memory_utilization": 0.9, "multimodal": {}, "engine": "vllm"}
ENCODE = {"name": "encode", "role": "encode", "gpu": "L4", "deployment": {"tensor_parallel_size": 1}}


def pictures(count: int = 12, every_ms: int = 100) -> Workload:
    items = (Item(10, 2000), Item(2020, 2000))
    return Workload(
        [WorkloadRequest(i, i * every_ms * 10**6, ((PRIVATE, 4100),), 5, items=items) for i in range(count)]
    )


def scenario(*pools, **settings):
    deployment = parse(Deployment, {**SERVED, **settings, "fleet": {"pools": list(pools)}}, where="deployment")
    return price_scenario(pictures(), None, "H100", deployment)


def test_an_encoder_needs_no_room_for_the_language_model_and_is_priced_as_its_gpu() -> None:
    big = {"model": "Qwen3-VL-235B-A22B", "tensor_parallel_size": 8}
    priced = scenario({"name": "serve"}, ENCODE | {"replicas": 2}, **big)
    assert priced.gpus == 8 + 2
    assert priced.usd_per_gpu_hour["encode"] == find_gpu("L4").usd_per_hour
    assert priced.num_blocks is not None  # an encoder keeps no KV
    with pytest.raises(UserError, match="gpu"):
        scenario({"name": "serve", "gpu": "L4", "deployment": {"tensor_parallel_size": 1}}, **big)


def test_a_recording_says_how_busy_encoders_were_and_a_diagnosis_adds_one(tmp_path) -> None:
    priced = scenario(ENCODE, {"name": "serve"})
    done = recorded(priced, tmp_path / "run", band=False, details=False)
    use = notes_of(Recording.load(tmp_path / "run").run)["encoders_apart"]
    assert (use["requests"], use["items"], use["replicas"]) == (12, 24, 1)
    assert 0 < use["busy_ns"] <= use["ready_ns"] and use["waiting_ns"] > use["busy_ns"] / 2
    assert "of encoder replicas (1, busy" in done.encoder
    (more,) = [pools for pools in changes(priced, "free encoding") if pools]
    assert [pool.get("replicas", 1) for pool in more["fleet.pools"]] == [2, 1]


def test_without_encoders_the_first_one_is_a_change_to_try() -> None:
    alone = scenario({"name": "serve", "replicas": 2})
    beside, instead = changes(alone, "free encoding")
    roles = [
        [(pool.get("role", "serve"), pool.get("replicas", 1)) for pool in one["fleet.pools"]]
        for one in (beside, instead)
    ]
    assert roles == [[("serve", 2), ("encode", 1)], [("serve", 1), ("encode", 1)]]


def test_a_split_counts_an_encoder_as_one_gpu() -> None:
    base = parse(Deployment, SERVED, where="deployment")
    splits = Split.listed(["none", "1e3", "2e1:2"])
    gpus = {"H100": find_gpu("H100")}
    engines, _ = candidate_engines(base, gpus, [2], ["vllm"], {}, splits=splits)
    assert [engine.name for engine in engines] == ["TP2 H100", "TP2 H100 1E3PD", "TP2 H100 2E1P2D"]
    assert [engine.gpus for engine in engines] == [2, 7, 8]
    fleet = engines[2].fleet(2, "round-robin")
    assert [(pool.role, pool.replicas) for pool in fleet.pools] == [("prefill", 2), ("decode", 4), ("encode", 4)]
    assert fleet.pools[-1].deployment["tensor_parallel_size"] == 1
    with pytest.raises(UserError, match="need multimodal"):
        candidate_engines(without_images(base), gpus, [2], ["vllm"], {}, splits=splits)


def without_images(base: Deployment) -> Deployment:
    return base.model_copy(update={"multimodal": None})


@pytest.mark.parametrize("text", ["0e3", "1e0", "e3", "1e", "1e1:0", "3"])
def test_a_wrong_split_is_one_line(text: str) -> None:
    with pytest.raises(UserError, match="or with encoders"):
        Split.parse(text)
