"""`python -m tests.realengine.interpreted PROFILE`: all checks that run in Triton's interpreter, imported once.

PROFILE is a hypothesis profile (tests/budget.py). The checks have their own process, because an access out of bounds
ends it. The name printed last is that of the check that failed.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import settings

from lab.gpu_suite.correctness import cases, check_case
from lab.gpu_suite.end_to_end import Noting
from tests import budget  # noqa: F401
from tokentwin.realengine.engine import Engine
from tokentwin.realengine.models.weights import ModelFiles, load_model_files
from tokentwin.realengine.sampling import SamplingParams
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.workload import WorkloadRequest

settings.load_profile(sys.argv[1])
LONG = sys.argv[1] == "long"

from tests.realengine import (  # noqa: E402
    kernels_attention_interpret,
    kernels_experts_interpret,
    kernels_fused_interpret,
    kernels_packed_interpret,
)


def suite() -> None:
    """Run the GPU suite's checks on our kernels, in one dtype: the checks before cover all dtypes."""
    every = cases(torch.device("cpu"), dry_run=True)
    wanted = [case for case in every if case.dtype == torch.float32 and case.kernel != "draw"]
    rows = [row for case in wanted for row in check_case(case, "triton")]
    assert {row["kernel"] for row in rows} >= {"paged_decode", "paged_prefill", "rope_store", "grouped_gemm", "argmax"}
    assert [row for row in rows if not row["ok"]] == []


def engine() -> None:
    """The whole engine gives the same tokens on our kernels as on torch, without a GPU (biases: `quantised_engine`)."""
    window = {"sliding_window": 9, "sliding_layers": 1, "sliding_at": (1,)}
    engines = [("qwen3", "triton", True, window), ("llama", "hybrid", False, {"num_layers": 1})]
    for model, attention, overlapped, shape in engines[: 2 if LONG else 1]:
        assert outputs(model, attention, overlapped, shape) == outputs(model, "torch", False, shape), model


def quantised_engine() -> None:
    """Weights that stay packed on our kernels give the tokens of the reference; a layer has products of each kind.
    Other bits are other tiles: `kernels_packed_interpret`."""
    few = {"num_layers": 1, "dense_at": (), "num_experts": 4, "experts_per_token": 2}
    ours, wanted = (
        outputs("qwen2-moe", attention, False, few, quantization="int4") for attention in ("triton", "torch")
    )
    assert ours == wanted


def scaled_kv_engine() -> None:
    """KV in FP8 with a checkpoint's scales: stored and read by our kernels as by the reference, which without them
    gives something else. The scales are so small that most KV is cut off: the interpreter rounds to fp8 wrongly."""
    ours, reference = (logits_of_fp8_kv(attention, (0.001, 0.002)) for attention in ("triton", "torch"))
    assert (ours - reference).norm() < 0.1 * reference.norm()
    assert (logits_of_fp8_kv("torch", ()) - reference).norm() > 0.5 * reference.norm()


def logits_of_fp8_kv(attention: str, scales: tuple[float, ...]) -> torch.Tensor:
    """Behind each token of a forced answer, after a prompt that is cut in two."""
    files = load_model_files("random:llama", Path())
    state = files.weights(torch.float32, torch.device("cpu"))
    for layer in range(files.spec.num_layers):
        named = zip(("k_scale", "v_scale"), map(torch.tensor, scales), strict=False)
        state |= {f"model.layers.{layer}.self_attn.{name}": scale for name, scale in named}
    config = SchedulerConfig(max_model_len=64, max_num_batched_tokens=24, num_blocks=40, block_size=4, max_num_seqs=4)
    deployment = Deployment(dtype="float32", kv_cache_dtype="fp8", attention=attention, scheduler=config)
    engine = Engine(deployment, ModelFiles(files.spec, state, "tiny"))
    noting = engine.runner.model.ops = Noting(engine.runner.model.ops)  # type: ignore[assignment]
    engine.add(WorkloadRequest(0, 0, (("", 30),), 3), [7 * at for at in range(30)], forced=[5, 6, 7])
    while engine.step() is not None:
        pass
    return torch.stack([logits[0] for logits in noting.logits])


def outputs(model: str, attention: str, overlapped: bool, shape: dict[str, Any], **settings: Any) -> list[list[int]]:
    files = load_model_files(f"random:{model}", Path())
    files = ModelFiles(files.spec.model_copy(update={"num_layers": 2, **shape}), None, "tiny")
    config = SchedulerConfig(
        max_model_len=64, max_num_batched_tokens=12, num_blocks=40, block_size=4, max_num_seqs=4,
        async_scheduling=overlapped,
    )  # fmt: skip
    engine = Engine(Deployment(model="tiny", dtype="float32", attention=attention, scheduler=config, **settings), files)
    engine.runner.graph_mixed_steps(attention == "triton")  # padded, as on a GPU
    sequences = []
    for number, length in enumerate((15, 4, 1)):  # the first step samples nothing
        how = SamplingParams(0.7, top_k=20, top_p=0.9, seed=3) if number == 1 else None
        prompt = [7 * i + number for i in range(length)]
        engine.add(WorkloadRequest(number, 0, (("", length),), 2), prompt, sampling=how)
        sequences.append(engine.sequences[number])
    while engine.step() is not None:
        pass
    return [sequence.outputs for sequence in sequences]


CHECKS: tuple[Callable[[], None], ...] = (
    *kernels_fused_interpret.CHECKS, *kernels_packed_interpret.CHECKS, *kernels_experts_interpret.CHECKS,
    *kernels_attention_interpret.CHECKS,
    engine, quantised_engine, *([scaled_kv_engine, suite] if LONG else []),
)  # fmt: skip

if __name__ == "__main__":
    for check in CHECKS:
        print(check.__name__, flush=True)
        check()
