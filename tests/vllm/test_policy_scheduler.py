"""Policies of ours decide inside of a real vLLM, and its requests are answered as under its own scheduler."""

import json
import subprocess
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.vllm.environment import PYTHON, environment, needs_vllm

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.deep, pytest.mark.vllm, needs_vllm]


def scenario(seed: int, policies: list[str], **settings: Any) -> dict[str, Any]:
    """Return a small workload and a configuration short of memory. Attention on CPUs needs blocks of 32 tokens."""
    chance = Random(seed)
    requests: list[dict[str, Any]] = []
    step = 0
    for id in range(chance.randint(4, 14)):
        step += chance.choice([0, 0, 1, 3, 12])
        prompt: list[list[Any]] = []
        kind = chance.choice(["alone", "system", "turn", "again"])
        if kind == "system":
            prompt = [[f"system {chance.randint(0, 1)}", chance.choice([32, 64, 65, 95])]]
        elif kind != "alone" and requests:
            before = chance.choice(requests[-4:])
            prompt = before["prompt"] + ([[f"out:{before['id']}", before["output_len"]]] if kind == "turn" else [])
        prompt = [*prompt, [f"own {id}", chance.choice([1, 7, 32, 50, 90])]]
        labels = {"tenant": f"t{chance.randint(0, 2)}", "slo_class": chance.choice(["chat", "batch"])}
        output_len = chance.choice([1, 2, 9, 33, 50])
        request = {"id": id, "step": step, "prompt": prompt, "output_len": output_len, "labels": labels}
        request |= {"priority": chance.randint(0, 2), "salt": chance.choice([None, None, None, "salt"])}
        request |= {"stop": chance.sample(range(512), 8) if chance.random() < 0.3 else []}
        request |= {"leaves": step + chance.randint(1, 30) if chance.random() < 0.15 else None}
        requests.append(request)
    longest = max(sum(count for _, count in r["prompt"]) + r["output_len"] for r in requests)
    blocks = -(-longest // 32)
    config = {
        "num_blocks": 1 + blocks + chance.choice([0, 1, blocks // 2, blocks, 3 * blocks]),
        "enable_prefix_caching": chance.random() < 0.8,
        "scheduler": {
            "max_num_seqs": chance.choice([1, 2, 4, 16]),
            "max_num_batched_tokens": chance.choice([16, 40, 64, 200, 1024]),
            "long_prefill_token_threshold": chance.choice([0, 0, 20, 64]),
            "scheduler_reserve_full_isl": chance.random() < 0.5,
            "watermark": chance.choice([0.0, 0.0, 0.1]),
            "policy": chance.choice(["fcfs", "priority"]),
        },
    }
    return {"config": config | settings, "requests": requests, "policies": policies}


def started(program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [str(PYTHON), str(Path(__file__).with_name(program)), *arguments]
    return subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True)


def answers(
    tmp_path: Path, overlapped: bool, scenarios: list[dict[str, Any]], v2: bool = False
) -> list[dict[str, Any]]:
    asked, answered = tmp_path / "asked.json", tmp_path / "answered.json"
    asked.write_text(json.dumps({"overlapped": overlapped, "v2": v2, "scenarios": scenarios}))
    done = started("drive_policies.py", str(asked), str(answered))
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(answered.read_text())
    return found


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("v2", [False, True])
def test_our_vllm_policy_decides_and_answers_as_vllm_does(tmp_path: Path, overlapped: bool, v2: bool) -> None:
    """What workers are told is the same, too. CPUs have no V2 model runner: there tokens are those of no model."""
    scenarios = [scenario(seed, ["own", "vllm"]) for seed in range(25)]
    preempted = hits = 0
    for asked, got in zip(scenarios, answers(tmp_path, overlapped, scenarios, v2), strict=True):
        assert got["vllm"] == got["own"], json.dumps(asked)
        preempted += sum(len(gone) for _, gone in got["own"]["steps"])
        hits += sum(got["own"]["cached"].values())
    assert preempted > 20 and hits > 1000  # else the scenarios show nothing


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_request_that_cannot_be_carried_ends_with_an_error(tmp_path: Path, overlapped: bool) -> None:
    asked = scenario(3, ["vllm"])
    asked["requests"][1]["masked"] = True
    asked["requests"] = [request | {"leaves": None} for request in asked["requests"]]
    (got,) = answers(tmp_path, overlapped, [asked])
    ends = got["vllm"]["ends"]
    assert ends.pop("1") == "error" and got["vllm"]["tokens"]["1"] == []
    assert set(ends.values()) <= {"stop", "length"} and len(ends) == len(asked["requests"]) - 1


@pytest.mark.parametrize(
    ("policy", "drafts", "line"),
    [
        ("fairr", [], "policy: 'fairr': must be vllm, static, "),
        ("fair", ['{"method": "ngram", "num_speculative_tokens": 2}'], "speculative_config: 'set': cannot be combined"),
    ],
)
def test_what_cannot_be_carried_is_refused_at_start(tmp_path: Path, policy: str, drafts: list[str], line: str) -> None:
    done = started("serve_policies.py", str(tmp_path), policy, *drafts)
    assert done.returncode != 0
    assert f"UserError: {line}" in done.stderr


def test_vllm_serves_with_a_policy_of_ours(tmp_path: Path) -> None:
    done = started("serve_policies.py", str(tmp_path), "fair")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "answered.json").read_text())
    assert found == {"answered": [8, 8, 8], "cached": [0, 32, 0], "again": [64, True], "reset": True, "after": 0}


@pytest.mark.parametrize("overlapped", [False, True])
def test_other_policies_answer_as_vllm_does(tmp_path: Path, overlapped: bool) -> None:
    """Nobody leaves early here: when a client hangs up, how far its answer has come depends on the policy."""
    (tmp_path / "shortest_prompt.py").write_text(_OF_THE_DOCS)
    own = f"{tmp_path / 'shortest_prompt.py'}:ShortestPrompt"
    policies = ["own", "fair", "edf", "sjf", "sarathi", "priority-ageing", "prefill-first", own]
    ours = {"edf_ttft_ms": {"chat": 500, "batch": 5000}, "sarathi_token_budget": 12}
    scenarios = [scenario(seed, policies, ours=ours) for seed in (103, 105, 106, 107)]
    for asked in scenarios:
        for request in asked["requests"]:
            request["leaves"] = None
            request["prompt"] = [piece for piece in request["prompt"] if not piece[0].startswith("out:")]
    orders = set()
    for asked, got in zip(scenarios, answers(tmp_path, overlapped, scenarios), strict=True):
        for name in policies:
            assert got[name]["tokens"] == got["own"]["tokens"], (name, json.dumps(asked))
            assert got[name]["ends"] == got["own"]["ends"]
        orders |= {name for name in policies if got[name]["steps"] != got["own"]["steps"]}
    assert orders == {*policies} - {"own"}  # each of them decides something else somewhere


_OF_THE_DOCS = """
from tokentwin.serving.policies.ranked import RankedScheduler


class ShortestPrompt(RankedScheduler):
    def score(self, request):
        return request.prompt_len
"""
