"""The whole engine on our Triton kernels, in Triton's interpreter: the same tokens as on torch, before any GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("triton", reason="triton is not installed (Linux on x86_64 only)")

pytestmark = [pytest.mark.engine, pytest.mark.interpret]

SCRIPT = """
import sys
from pathlib import Path
from realengine.engine import Engine
from realengine.sampling import SamplingParams
from realengine.weights import ModelFiles, load_model_files
from serving.deployments.config import Deployment, SchedulerConfig
from serving.workload import WorkloadRequest


def outputs(model, attention, kv, loop):
    files = load_model_files("random:" + model, Path())
    files = ModelFiles(files.spec.model_copy(update={"num_layers": 2}), None, "tiny")
    config = SchedulerConfig(max_model_len=64, max_num_batched_tokens=24, num_blocks=40, block_size=4, max_num_seqs=4,
                             async_scheduling=loop == "overlapped")
    engine = Engine(Deployment(model="tiny", dtype="float32", attention=attention, kv_cache_dtype=kv, scheduler=config),
                    files)
    sequences = []
    for number, length in enumerate((30, 5, 1)):  # the first step samples nothing
        how = SamplingParams(0.7, top_k=20, top_p=0.9, seed=3) if number == 1 else None
        prompt = [7 * i + number for i in range(length)]
        engine.add(WorkloadRequest(number, 0, (("", length),), 3), prompt, sampling=how)
        sequences.append(engine.sequences[number])
    while engine.step() is not None:
        pass
    return [s.outputs for s in sequences]


for way in sys.argv[1:]:
    print(outputs(*way.split()))
"""


def outputs(*ways: str) -> list[str]:
    """What the tiny engine answers each way, from a process of its own: an access out of bounds would end it."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *ways], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "ours", ["qwen3 triton auto overlapped", "qwen2 triton auto overlapped", "llama hybrid auto plain"]
)
def test_the_engine_on_our_kernels_gives_the_tokens_of_the_reference(ours: str) -> None:
    found, reference = outputs(ours, f"{ours.split()[0]} torch auto plain")
    assert found == reference
