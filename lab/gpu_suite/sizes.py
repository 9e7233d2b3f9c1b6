"""The sizes of all measurements: for a GPU, or in miniature for a dry run."""

from __future__ import annotations

from typing import Any, NamedTuple

from serving.deployments.config import Deployment, SchedulerConfig


class Sizes(NamedTuple):
    """The sizes of a run.

    Attributes:
        large, small: deployments of the two measured engines; only the large one is recorded
        run_seconds: seconds of arrivals of one recorded run
        run_longest: maximum tokens of a request in a recorded run, few enough for requests to end soon after the
            arrivals
        benchmark: shapes of the engine benchmark
    """

    dry_run: bool
    device: str
    large: Deployment
    small: Deployment
    run_seconds: float
    run_longest: int
    benchmark: dict[str, Any]


def gpu_sizes() -> Sizes:
    """Return Llama-3.1-8B's and Qwen3-0.6B's shapes with random weights, in bf16."""
    scheduler = SchedulerConfig(
        max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=16896, async_scheduling=True
    )
    engine = {"device": "cuda", "attention": "triton", "gpu_memory_utilization": 0.88, "scheduler": scheduler}
    return Sizes(
        False,
        "cuda",
        Deployment(model="random:llama-3.1-8b", **engine),
        Deployment(model="random:qwen3-0.6b", **engine),
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
    return Sizes(
        True,
        "cpu",
        Deployment(model="random:llama", dtype="float32", scheduler=scheduler),
        Deployment(model="random:qwen3", dtype="float32", scheduler=scheduler),
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
