"""vLLM as the real engine: it replays a workload, with its own policy or one of ours, and its recording is replayed."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from calibration.validation.decision_replay import recorded_deployment, replay_decisions
from planning.measure.real_engine import load_engines
from serving.deployments.config import Deployment, parse
from serving.workload import Workload
from tests.vllm.environment import needs_vllm
from tests.vllm.tiny_model import TINY
from traces.recording import Recording
from traces.synth import parse_spec, synthesise

pytestmark = [pytest.mark.deep, pytest.mark.vllm, needs_vllm, pytest.mark.timeout(600)]

SCHEDULER = {
    "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 384, "num_blocks": 13, "block_size": 32,
}  # fmt: skip
OWN = """
from serving.policies.ranked import RankedScheduler

class ShortestPrompt(RankedScheduler):
    def score(self, request):
        return request.prompt_len
"""


def traffic(requests: int = 40) -> Workload:
    spec = {
        "name": "x",
        "seed": 3,
        "requests": requests,
        "arrivals": {"kind": "poisson", "rate": 50},
        "prompt": {"kind": "lognormal", "mean": 60, "sigma": 0.8, "max": 200},
        "output": {"kind": "lognormal", "mean": 12, "sigma": 0.8, "max": 60},
        "system_prompts": {"count": 3, "tokens": {"kind": "fixed", "tokens": 64}},
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


def test_ctrl_c_ends_a_run_and_keeps_what_there_is(deployed: Callable[..., Deployment], tmp_path: Path) -> None:
    def press(ended: int) -> None:
        if ended == 5:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()

    with closing(load_engines(deployed(), lambda line: None)) as engine:
        done = engine.record(traffic(4000), tmp_path / "run", progress=press)
        again = engine.record(traffic(5), tmp_path / "again")
    assert done.status == Recording.load(tmp_path / "run").run["status"] == "interrupted"
    assert 5 <= done.finished < 4000 and again.finished == 5
