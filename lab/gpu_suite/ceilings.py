"""The limits of the device: the rates that every other figure is compared with, measured if possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lab.gpu_suite.ragged_batch import Numbers
from lab.gpu_suite.timing import Bench, Timing
from tokentwin.realengine.models.linear import round_to_fp8

_COPY_BYTES = 4 << 30  # bytes that the copy reads; it writes as many
_GEMM_SIZE = 8192
_LAUNCHES = 200
Row = dict[str, Any]


def ceilings(bench: Bench, dry_run: bool) -> list[Callable[[], list[Row]]]:
    """Return the measurements, each of one row: a limit's name `ceiling`, its `value`, and `Timing.spread_pct`.

    The value is None if the device has no such units. The limits are

    - copy_bytes_per_s: rate of a large copy by a kernel, as bytes read plus bytes written
    - gemm_flops_per_s: rate of a bf16 GEMM, 8192 in each dimension, of random numbers (zeros would be faster)
    - fp8_gemm_flops_per_s: rate of such a GEMM in fp8 e4m3 with a scale for each row and column
    - launch_graph_ns: time from one launch of a nearly empty kernel to the next, in a graph
    - launch_eager_ns: the same time if the host launches the kernels

    `dry_run` measures with tiny sizes.
    """
    copied = 1 << 20 if dry_run else _COPY_BYTES
    size = 64 if dry_run else _GEMM_SIZE
    numbers = Numbers(bench.device)

    def pair(_: int) -> tuple[torch.Tensor, torch.Tensor]:
        source = numbers(copied // 2)
        return source, torch.empty_like(source)

    def copy() -> list[Row]:
        # A kernel makes the copy, because `copy_` in a CUDA graph runs at only two thirds of the memory's rate.
        timing = bench.time(pair, lambda tensors: torch.neg(tensors[0], out=tensors[1]), 2 * copied)
        return [_rate("copy_bytes_per_s", 2 * copied, timing)]

    def gemm() -> list[Row]:
        made = 2 * size * size * 2
        timing = bench.time(lambda _: (numbers(size, size), numbers(size, size)), lambda x: x[0] @ x[1], made)
        return [_rate("gemm_flops_per_s", 2 * size**3, timing)]

    def scaled(_: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        (x, x_scale), (weight, scale) = round_to_fp8(numbers(size, size)), round_to_fp8(numbers(size, size))
        return x, weight.t(), x_scale, scale.t().contiguous()

    def fp8_gemm() -> list[Row]:
        try:
            timing = bench.time(scaled, lambda x: torch._scaled_mm(*x, out_dtype=torch.bfloat16), 2 * size * size)
        except RuntimeError:  # the device has no fp8 units
            return [{"ceiling": "fp8_gemm_flops_per_s", "value": None, "spread_pct": None}]
        return [_rate("fp8_gemm_flops_per_s", 2 * size**3, timing)]

    def launch_in_graph() -> list[Row]:
        tiny = torch.zeros(32, device=bench.device)
        timing = bench.time(lambda _: tiny, lambda x: x.add_(1), tiny.nbytes)
        return [{"ceiling": "launch_graph_ns", "value": timing.median_ns, "spread_pct": timing.spread_pct}]

    def launch_eagerly() -> list[Row]:
        tiny = torch.zeros(32, device=bench.device)
        timing = bench.time_eagerly(lambda: tiny.add_(1), _LAUNCHES)
        return [{"ceiling": "launch_eager_ns", "value": timing.median_ns, "spread_pct": timing.spread_pct}]

    return [copy, gemm, fp8_gemm, launch_in_graph, launch_eagerly]


def _rate(name: str, amount: int, timing: Timing) -> Row:
    return {"ceiling": name, "value": amount / timing.median_ns * 1e9, "spread_pct": timing.spread_pct}
