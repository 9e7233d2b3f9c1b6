"""vLLM as the real engine: it replays a workload, with its own policy or one of ours, and its recording is replayed."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.environment import needs_vllm
from tests.vllm.tiny_adapters import save_adapters
from tests.vllm.tiny_model import BERT, TINY
from tokentwin.calibration.validation.decision_replay import recorded_deployment, replay_decisions
from tokentwin.planning.measure.real_engine import load_engines
from tokentwin.serving.deployments.config import Deployment, parse
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload
from tokentwin.traces.recording import Recording
from tokentwin.traces.synth import parse_spec, synthesise

pytestmark = [pytest.mark.deep, pytest.mark.vllm, needs_vllm, pytest.mark.timeout(600)]

SCHEDULER = {
    "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 384, "num_blocks": 13, "block_size": 32,
}  # fmt: skip
OWN = """
from tokentwin.serving.policies.ranked import RankedScheduler

class ShortestPrompt(RankedScheduler):
    def score(self, request):
        return request.prompt_len
"""


def traffic(requests: int = 40) -> Workload:
    """Return requests that come almost at once, so that a machine of any speed has to preempt."""
    spec = {
        "name": "x",
        "seed": 3,
        "requests": requests,
        "arrivals": {"kind": "poisson", "rate": 50_000},
        "prompt": {"kind": "lognormal", "mean": 60, "sigma": 0.8, "max": 200},
        "output": {"kind": "lognormal", "mean": 12, "sigma": 0.8, "max": 60},
        "system_prompts": {"count": 3, "tokens": {"kind": "fixed", "tokens": 64}},
        "changes_logits": 0.3,
        "scores_prompt": 0.1,
    }
    return synthesise(parse_spec(spec, where="x"))


@pytest.fixture
def deployed(tmp_path: Path) -> Callable[..., Deployment]:
    (tmp_path / "config.json").write_text(json.dumps(TINY))

    def make(**stated: Any) -> Deployment:
        known = {"model": str(tmp_path), "engine": "vllm", "dtype": "float32", "scheduler": SCHEDULER}
        return parse(Deployment, known | stated, where="test")

    return make


@pytest.mark.parametrize("policy", ["vllm", "sjf", "shortest_prompt.py:ShortestPrompt"])
def test_a_workload_is_replayed_and_decided_again(
    policy: str, deployed: Callable[..., Deployment], tmp_path: Path
) -> None:
    if policy.endswith(".py:ShortestPrompt"):
        (tmp_path / "shortest_prompt.py").write_text(OWN)
        policy = f"{tmp_path}/{policy}"
    with closing(load_engines(deployed(policy=policy), lambda line: None)) as engine:
        done = engine.record(traffic(), tmp_path / "run")
    recording = Recording.load(tmp_path / "run")
    result = replay_decisions(recording)
    assert (done.status, done.finished) == ("complete", 40)
    assert result.exact and result.steps > 50, result
    assert recorded_deployment(recording).policy == policy
    assert recorded_deployment(recording).engine == "vllm 0.32.0"
    assert sum(recording.steps["preempted"].to_pylist()) > 0
    marks = [
        [(one.changes_logits, one.scores_prompt) for one in workload.requests]
        for workload in (traffic(), recording.workload())
    ]
    assert marks[0] == marks[1] and len({*marks[0]}) >= 3


def test_adapters_are_loaded_timed_and_decided_again(deployed: Callable[..., Deployment], tmp_path: Path) -> None:
    save_adapters(tmp_path / "adapters", 4)
    lora = {"max_loras": 2, "max_lora_rank": 8, "max_cpu_loras": 3, "adapters": str(tmp_path / "adapters")}
    names = ("adapter0", "adapter1", "", "adapter2", "adapter3", "adapter0")
    # vLLM 0.32 on a CPU fails if a step samples for several requests and scores the prompt of one, with adapters
    asked = [replace(one, adapter=names[one.id % len(names)], scores_prompt=False) for one in traffic().requests]
    with closing(load_engines(deployed(lora=lora), lambda line: None)) as engine:
        engine.record(Workload(asked, "adapted"), tmp_path / "run")
        with pytest.raises(UserError, match=r"adapter: 'nobody': has no adapter_config.json"):
            engine.record(Workload([replace(asked[0], adapter="nobody")]), tmp_path / "again")
    recording = Recording.load(tmp_path / "run")
    assert replay_decisions(recording).exact
    assert [one.adapter for one in recording.workload().requests] == [one.adapter for one in asked]
    work = [row for row in recording.steps["adapters"].to_pylist() if row is not None]
    assert max(row["adapters"] for row in work) == 2
    loads, copies = (sum(row[name] for row in work) for name in ("loads", "copies"))
    assert 4 <= loads <= copies and all((row["load_ns"] > 0) == (row["loads"] > 0) for row in work)


def test_embeddings_are_decided_again_and_tokens_refused(deployed: Callable[..., Deployment], tmp_path: Path) -> None:
    scheduler = {"max_num_seqs": 4, "max_num_batched_tokens": 512, "max_model_len": 512, "block_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(BERT))
    deployment = parse(
        Deployment,
        {"model": str(tmp_path), "engine": "vllm", "dtype": "float32", "scheduler": scheduler},
        where="test",
    )
    with closing(load_engines(deployment, lambda line: None)) as engine:
        done = engine.record(Workload([replace(one, output_len=0) for one in traffic().requests]), tmp_path / "run")
        with pytest.raises(UserError, match=r"wants output tokens, and .* has no LM head"):
            engine.record(traffic(), tmp_path / "again")
    recording = Recording.load(tmp_path / "run")
    result = replay_decisions(recording)
    assert done.finished == 40 and result.exact and result.steps >= 10, result
    assert recorded_deployment(recording).scheduler.kv_reservation == "none"


def test_ctrl_c_ends_a_run_and_keeps_what_there_is(deployed: Callable[..., Deployment], tmp_path: Path) -> None:
    def press(ended: int) -> None:
        if ended == 5:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()

    with closing(load_engines(deployed(), lambda line: None)) as engine:
        done = engine.record(traffic(4000), tmp_path / "run", progress=press)
        again = engine.record(traffic(5), tmp_path / "again")
    assert done.status == Recording.load(tmp_path / "run").run["status"] == "interrupted"
    assert 5 <= done.finished < 4000 and again.finished == 5
