"""One operation done in several ways: by our kernels, by libraries, and by ours with other settings.

Each way is checked against float64 at a small size and timed at those sizes at which the choice matters. A way whose
library is not installed gets a row with the reason. So the first minute on a new GPU or with a new library tells which
way the engine should take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import inf, isfinite
from typing import Any, NamedTuple

import torch

from lab.gpu_suite.attention_operations import attention
from lab.gpu_suite.operations import Mixture, On, Operation, Packing, grouped_gemm, packed_gemm, router
from lab.gpu_suite.ragged_batch import Row
from lab.gpu_suite.timing import Bench
from tokentwin.realengine.attention import LIBRARIES
from tokentwin.realengine.kernels.launches import Shape

_BF16 = torch.bfloat16
_CHECKED = [(700, 1), (3, 1), (300, 300), (1027, 130), (65, 2)]
_ROWS: dict[str, list[Row]] = {
    "decode, 64 rows of 1k": [(1024, 1)] * 64,
    "decode, 16 rows of 4k": [(4096, 1)] * 16,
    "decode, 1 row of 16k": [(16384, 1)],
    "drafts, 1 row of 5 over 2k": [(2053, 5)],
    "drafts, 64 rows of 5 over 4k": [(4101, 5)] * 64,
    "chunk of 512 over 8k": [(8704, 512)],
    "prompt of 8k": [(8192, 8192)],
}
_PAGED_BY_256 = ("varlen", "flash-attn")  # FlashAttention 2 cannot read smaller blocks
_LARGE_MIXTURE = Mixture(2048, 768, 128, 8)  # Qwen3-30B-A3B


class Way(NamedTuple):
    """A way to do the operation `what`.

    `check` is the operation at a small size; None if other checks of the suite cover it.
    """

    what: str
    way: str
    operation: Callable[[], Operation]
    check: Callable[[], Operation] | None = None


def ways(device: torch.device, dry_run: bool) -> Iterator[Way]:
    """Yield the ways, those of one operation one after the other."""
    on = On(device, "torch" if device.type == "cpu" else "triton")
    rows = {"decode": [(33, 1)], "prompt": [(20, 20)]} if dry_run else _ROWS
    many_parts = on._replace(settings={"few_parts": False})
    ours = {on.backend: on, "hybrid": on._replace(backend="hybrid"), "many parts": many_parts}
    libraries = {name: on._replace(backend=name) for name in LIBRARIES}
    for what, sizes in rows.items():
        for way, mine in (({on.backend: on} if device.type == "cpu" else ours) | libraries).items():
            page = 256 if way in _PAGED_BY_256 else 16
            shape = Shape("Llama-3.1-8B", 32, 8, 128, _BF16, _BF16, page)
            longest = max(8192, *(context for context, _ in sizes))
            check = partial(attention, mine, shape, _CHECKED, 2048, checked=True) if way in LIBRARIES else None
            yield Way(f"attention: {what}", way, partial(attention, mine, shape, sizes, longest), check)
    by_kernel, by_library = ({"unpacked_from": at, "grouped_from": at} for at in (inf, 0))
    kernels = {"our kernel": on._replace(settings=by_kernel), "a library's GEMM": on._replace(settings=by_library)}
    packing, mixture = Packing(28672, 4096, 4, 128), _LARGE_MIXTURE
    most: tuple[int, ...] = (128, 256, 512, 2048)
    if device.type == "cpu":
        kernels = {on.backend: on}
    if dry_run:
        packing, mixture, most = Packing(48, 160, 4, 32), Mixture(72, 48, 6, 2), (5,)
    small = Mixture(256, 128, 8, 2)
    for tokens in most:
        for way, mine in kernels.items():
            packed_check = partial(packed_gemm, mine, Packing(128, 256, 4, 128), 40)
            yield Way(f"int4 GEMM, {tokens} tokens", way, partial(packed_gemm, mine, packing, tokens), packed_check)
    for tokens in (*most[2:], 8192) if not dry_run else most:
        for way, mine in kernels.items():
            experts_check = partial(grouped_gemm, mine, small, 40)
            yield Way(f"experts, {tokens} tokens", way, partial(grouped_gemm, mine, mixture, tokens), experts_check)
    for tokens in (64, 2048) if not dry_run else most:
        for way in dict.fromkeys((on.backend, "torch")):
            yield Way(f"router, {tokens} tokens", way, partial(router, on._replace(backend=way), mixture, tokens))


def comparisons(bench: Bench, device: torch.device, dry_run: bool) -> list[Callable[[], list[dict[str, Any]]]]:
    """Return the measurements. Each returns a row with what, way, median_ns, error, limit, and why there is no time."""
    return [partial(_compared, way, bench) for way in ways(device, dry_run)]


def _compared(way: Way, bench: Bench) -> list[dict[str, Any]]:
    row: dict[str, Any] = {"what": way.what, "way": way.way, "median_ns": None, "error": None, "why": None}
    try:
        if way.check is not None:
            case = way.check()
            make, call, error_of = case.prepare()
            assert error_of is not None
            error = float(error_of(make(0), call(*make(0))))
            row |= {"error": error if isfinite(error) else str(error), "limit": case.limit}
            if not error <= case.limit:
                return [row | {"why": f"wrong: error {error:.2g}, at most {case.limit:g}"}]
        operation = way.operation()
        make, call, _ = operation.prepare()
        row["median_ns"] = bench.time(make, lambda given: call(*given), operation.cost.bytes).median_ns
    except Exception as failure:  # a library that is not installed, or whatever its launch may raise
        row["why"] = f"{type(failure).__name__}: {str(failure)[:200]}"
    return [row]
