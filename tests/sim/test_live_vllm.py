"""Random scenarios, decided by vLLM itself: `TOKENTWIN_VLLM_PYTHON` names an interpreter that can import vllm 0.33."""

import gzip
import json
import os
import shlex
import subprocess
from pathlib import Path
from random import Random
from typing import Any

import pytest

from sim.conformance import conform
from tests.serving.test_policy_naive import random_recording, with_windows

PYTHON = os.environ.get("TOKENTWIN_VLLM_PYTHON", "")
SCENARIOS = int(os.environ.get("TOKENTWIN_VLLM_SCENARIOS", "60"))


def scenario(seed: int) -> dict[str, Any]:
    """A scenario of the naive program's, with sliding windows at times, and drafts, which that does not know."""
    chance = Random(seed)
    found = random_recording(chance, chance.choice(["fcfs", "priority"]), chance.random() < 0.5, sharing=True)
    config = found["config"]
    config["max_num_batched_tokens"] = max(config["max_num_batched_tokens"], config["max_num_seqs"])
    if chance.random() < 0.7:
        tokens = chance.choice([1, 2, 4])
        config["speculative"] = {
            "method": chance.choice(["ngram", "draft_model", "eagle"]),
            "num_speculative_tokens": tokens,
            "acceptance_rate": chance.choice([0.0, 0.4, 0.9, 1.0]),
        }
        config["max_num_batched_tokens"] += (tokens + 1) * config["max_num_seqs"]
        config["num_blocks"] += 2 * tokens  # we reject at once what only enough accepted drafts would bring to an end
    if chance.random() < 0.3 and config.get("speculative", {}).get("method") != "draft_model":
        config |= with_windows(config, chance)
    if chance.random() < 0.4:
        config["vllm"] = rarer_settings(config, chance)
        for request in found["requests"]:
            request["skip_cache"] = chance.random() < 0.2
    return {"name": f"seed {seed}", **found}


def rarer_settings(config: dict[str, Any], chance: Random) -> dict[str, Any]:
    """Of vLLM's scheduler, some."""
    settings = {
        "max_num_active_seqs": chance.randint(1, config["max_num_seqs"]),
        "prefill_schedule_interval": chance.choice([2, 3, 8]),
        "long_prefill_token_threshold_adaptive": True,
    }
    if config.get("enable_chunked_prefill", True):
        settings["max_num_scheduled_tokens"] = chance.randint(1, config["max_num_batched_tokens"])
    return {name: value for name, value in settings.items() if chance.random() < 0.5}


@pytest.mark.deep
@pytest.mark.skipif(not PYTHON, reason="TOKENTWIN_VLLM_PYTHON does not name an interpreter that can import vllm 0.33")
def test_vllm_decides_random_scenarios_alike(tmp_path: Path) -> None:
    paths = [tmp_path / f"{seed}.json" for seed in range(SCENARIOS)]
    for seed, path in enumerate(paths):
        path.write_text(json.dumps(scenario(seed)))
    program = Path(__file__).with_name("live_vllm.py")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    subprocess.run([*shlex.split(PYTHON), str(program), *map(str, paths)], env=environment, check=True)
    decided = 0
    for path in paths:
        recording = path.with_suffix(".rec.json.gz")
        told = json.loads(gzip.decompress(recording.read_bytes()))
        if "stuck" not in told:
            decided += 1
            result = conform(recording)
            assert result.identical, f"{result}\n{json.dumps(told['config'])}"
    assert decided > SCENARIOS * 0.8
