"""The sizes of all measurements: for a GPU, or in miniature for a dry run."""

from __future__ import annotations

from typing import Any, NamedTuple

from tokentwin.serving.deployments.config import Deployment, SchedulerConfig


class Sizes(NamedTuple):
    """The sizes of a run.

    Attributes:
        deployments: the measured engines: large and small, of which only the large one is recorded, a mixture of
            experts, and the large one with weights in fp8 and int4
        run_seconds: seconds of arrivals of one recorded run
        run_longest: maximum tokens of a request in a recorded run, few enough for requests to end soon after the
            arrivals
        benchmark: shapes of the engine benchmark
    """

    dry_run: bool
    device: str
    deployments: dict[str, Deployment]
    run_seconds: float
    run_longest: int
    benchmark: dict[str, Any]


def gpu_sizes() -> Sizes:
    """Return the shapes of Llama-3.1-8B (bf16, FP8, int4), Qwen3-0.6B and Qwen3-30B-A3B (bf16), with random weights."""
    scheduler = SchedulerConfig(
        max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=16896, async_scheduling=True
    )
    engine = {"device": "cuda", "attention": "triton", "gpu_memory_utilization": 0.88, "scheduler": scheduler}
    return Sizes(
        False,
        "cuda",
        {
            "large": Deployment(model="random:llama-3.1-8b", **engine),
            "small": Deployment(model="random:qwen3-0.6b", **engine),
            "mixture": Deployment(model="random:qwen3-30b-a3b", **engine),
            "fp8": Deployment(model="random:llama-3.1-8b", quantization="fp8", **engine),
            "int4": Deployment(model="random:llama-3.1-8b", quantization="int4", **engine),
        },
        run_seconds=7.2,
        run_longest=4224,
        benchmark={
            "decode_rows": (1, 8, 64, 256),
            "context": 1024,
            "decode_steps": 48,
            "timing_rows": 64,
            "mixed": ((64, 448), (8, 56), (128, 1920)),
            "prefill_tokens": (8192, 512, 1024, 2048, 4096, 16384),
            "requests": 256,
            "longest": 1024,
        },
    )


def dry_sizes() -> Sizes:
    """Return the sizes for tiny models on the CPU; the other settings are those of a GPU."""
    scheduler = SchedulerConfig(
        max_num_seqs=16, max_num_batched_tokens=64, max_model_len=192, num_blocks=400, async_scheduling=True
    )
    engine = {"dtype": "float32", "scheduler": scheduler}
    return Sizes(
        True,
        "cpu",
        {
            "large": Deployment(model="random:llama", **engine),
            "small": Deployment(model="random:qwen3", **engine),
            "mixture": Deployment(model="random:qwen3-moe", **engine),
            "fp8": Deployment(model="random:llama", quantization="fp8", **engine),
            "int4": Deployment(model="random:llama", quantization="int4", **engine),
        },
        run_seconds=0.8,
        run_longest=192,
        benchmark={
            "decode_rows": (1, 8),
            "context": 32,
            "decode_steps": 7,
            "timing_rows": 8,
            "mixed": ((4, 12),),
            "prefill_tokens": (64, 128),
            "requests": 6,
            "longest": 16,
        },
    )
