"""What the device can do at most: the rates that every other figure is held against, measured and not looked up."""

from __future__ import annotations

from typing import Any

import torch

from realengine.gpu_suite.timing import Bench
from realengine.projection import quantised

_COPY_BYTES = 4 << 30  # read, and as many written
_GEMM_SIZE = 8192
_LAUNCHES = 200


def measure_ceilings(bench: Bench, dry_run: bool) -> dict[str, Any]:
    """The rates of the device, by name.

    copy_bytes_per_s      of a large copy, bytes read and bytes written
    gemm_flops_per_s      of a bf16 GEMM, 8192 in each dimension, of random numbers (zeros would be faster)
    fp8_gemm_flops_per_s  of the same in fp8 e4m3 with a scale for each row and column; None where there is none
    launch_graph_ns       from one launch of a kernel with next to nothing to do to the next, in a graph
    launch_eager_ns       the same when the host launches them
    *_spread_pct          as in `Timing`

    `dry_run` does it in miniature.
    """
    copied = 1 << 20 if dry_run else _COPY_BYTES
    size = 64 if dry_run else _GEMM_SIZE
    draw = torch.Generator(bench.device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, device=bench.device, dtype=torch.bfloat16)

    def pair(_: int) -> tuple[torch.Tensor, torch.Tensor]:
        source = random(copied // 2)
        return source, torch.empty_like(source)

    copy = bench.time(pair, lambda tensors: tensors[1].copy_(tensors[0]), 2 * copied)
    gemm = bench.time(lambda _: (random(size, size), random(size, size)), lambda x: x[0] @ x[1], 2 * size * size * 2)
    found = {
        "copy_bytes_per_s": 2 * copied / copy.median_ns * 1e9,
        "copy_spread_pct": round(copy.spread_pct, 2),
        "gemm_flops_per_s": 2 * size**3 / gemm.median_ns * 1e9,
        "gemm_spread_pct": round(gemm.spread_pct, 2),
    }

    def scaled(_: int) -> tuple[torch.Tensor, ...]:
        (x, x_scale), (weight, scale) = quantised(random(size, size)), quantised(random(size, size))
        return x, weight.t(), x_scale, scale.t().contiguous()

    try:
        fp8 = bench.time(scaled, lambda x: torch._scaled_mm(*x, out_dtype=torch.bfloat16), 2 * size * size)
        found["fp8_gemm_flops_per_s"] = 2 * size**3 / fp8.median_ns * 1e9
    except RuntimeError:  # the device has no fp8 units
        found["fp8_gemm_flops_per_s"] = None

    tiny = torch.zeros(32, device=bench.device)
    graph = bench.time(lambda _: tiny, lambda x: x.add_(1), tiny.nbytes)
    eager = bench.time_eagerly(lambda: tiny.add_(1), _LAUNCHES)
    return found | {"launch_graph_ns": graph.median_ns, "launch_eager_ns": eager.median_ns}
