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
from serving.config import Deployment, SchedulerConfig
from serving.workload import WorkloadRequest

files = load_model_files("random:" + sys.argv[1], Path())
files = ModelFiles(files.spec.model_copy(update={"num_layers": 2}), None, "tiny")
config = SchedulerConfig(max_model_len=64, max_num_batched_tokens=24, num_blocks=40, block_size=4, max_num_seqs=4,
                         async_scheduling=sys.argv[4] == "overlapped")
engine = Engine(Deployment(model="tiny", dtype="float32", attention=sys.argv[2], kv_cache_dtype=sys.argv[3],
                           scheduler=config), files)
sequences = []
for number, length in enumerate((30, 5, 1)):  # the first step samples nothing
    how = SamplingParams(0.7, top_k=20, top_p=0.9, seed=3) if number == 1 else None
    engine.add(WorkloadRequest(number, 0, (("", length),), 3), [7 * i + number for i in range(length)], sampling=how)
    sequences.append(engine.sequences[number])
while engine.step() is not None:
    pass
print([s.outputs for s in sequences])
"""


def outputs(model: str, attention: str, kv: str, loop: str) -> str:
    """What the tiny engine answers, from a process of its own: an access out of bounds would end it."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, model, attention, kv, loop],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("model", ["qwen3", "qwen2"])
def test_the_triton_engine_gives_the_tokens_of_the_reference(model: str) -> None:
    assert outputs(model, "triton", "auto", "overlapped") == outputs(model, "torch", "auto", "plain")


def test_the_hybrid_engine_too() -> None:
    assert outputs("llama", "hybrid", "auto", "plain") == outputs("llama", "torch", "auto", "plain")
