"""Every kernel against float64, on fresh random inputs, at the shapes that it will be run and timed at.

What it must compute is in `references.py`. Memory that a kernel allocates is NaN before it runs, and so is the cache
wherever no row has written: what is not written, or read without right, is seen. Each is run twice, and a result that
moves is a race. A case that raises is a row like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from typing import Any

import torch

from realengine.gpu_suite.expert_batch import Mixture
from realengine.gpu_suite.kernel_cases import (
    Case,
    Outputs,
    Packing,
    argmax_case,
    attention_case,
    draw_case,
    experts_case,
    invariance_case,
    mask_case,
    norm_case,
    packed_case,
    rope_case,
    silu_case,
)
from realengine.kernels.attention_shapes import SHAPES, WINDOWED, Shape

_F32, _F16, _BF16, _FP8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn


def check_kernels(device: torch.device, dry_run: bool) -> Iterator[dict[str, Any]]:
    """A row for each check, the kernels of the measured models first.

    kernel, case, dtype   what was checked, on what, in which dtype
    backend               "triton", or "torch": the references of the engine, where Triton has no device to run on
    error, limit          see `relative_error`; wrong rows (argmax); distance in cumulative mass (draw); differing
                          elements of a repeat. Text if it is not a number
    ok                    error <= limit

    `dry_run` does a few tiny shapes, in Triton's interpreter if that is on.
    """
    for case in cases(device, dry_run):
        yield from check_case(case, _backend_of(device))


def cases(device: torch.device, dry_run: bool) -> Iterator[Case]:
    """What is checked. On the meta device they can be prepared and run, and nothing is computed."""
    backend = _backend_of(device)
    yield from _tiny_cases(backend, device) if dry_run else _cases(backend, device)


def check_case(case: Case, backend: str) -> Iterator[dict[str, Any]]:
    """The row of a case, and of its repeat, bit for bit, if it ran."""
    about = {"kernel": case.kernel, "case": case.case, "dtype": _name(case.dtype), "backend": backend}
    try:
        run, error_of = case.prepare()
        with _empty_is_nan():
            first, second = run(), run()
        error = float(error_of(first))
        moved = float(_differing(first, second))
    except Exception as failure:  # whatever a kernel's launch may raise
        message = f"{type(failure).__name__}: {str(failure)[:300]}"
        yield about | {"error": message, "limit": case.limit, "ok": False}
        return
    yield about | {"error": error if isfinite(error) else str(error), "limit": case.limit, "ok": error <= case.limit}
    yield about | {"case": f"{case.case}, twice", "error": moved, "limit": 0.0, "ok": moved == 0}


_PACKINGS = (
    Packing(6144, 4096, 4, 128),  # Llama-3.1-8B's QKV
    Packing(4096, 14336, 4, 128, zeros=True),  # and its down projection, as AWQ keeps it
    Packing(6144, 4096, 8),
)

# What is checked


def _cases(backend: str, device: torch.device) -> Iterator[Case]:
    attention = sorted(SHAPES, key=lambda shape: (shape.page != 16, shape.cached == _FP8, shape.dtype != _BF16))
    for number, shape in enumerate(attention):
        if number == 2:  # those of the measured models are done
            yield from _small_cases(backend, device)
        yield from _attention_cases(backend, shape, device, seed=10 * number)
        yield from _rope_cases(backend, shape, device)
    shorter = WINDOWED._replace(window=512)  # than most contexts of the cases
    yield from _attention_cases(backend, shorter, device, seed=10 * len(attention))


def _attention_cases(backend: str, shape: Shape, device: torch.device, seed: int) -> Iterator[Case]:
    ragged = [(context, 1) for context in (1, 15, 16, 17, 64, 65, 129, 1000, 4097, 2500)]
    chunks = [(700, 1), (3, 1), (300, 300), (1027, 130), (65, 2), (129, 129)]
    many = [(1 + 37 * index % 901, 1) for index in range(200)]
    yield attention_case("paged_decode", backend, shape, ragged, device, seed, longest=8192)
    yield attention_case("paged_decode", backend, shape, many, device, seed + 1, longest=1024)
    yield attention_case("paged_prefill", backend, shape, chunks, device, seed + 2, longest=2048)
    yield invariance_case(backend, shape, ragged, device, seed + 3)


def _rope_cases(backend: str, shape: Shape, device: torch.device) -> Iterator[Case]:
    norms, interleaved = shape.model.startswith("Qwen3"), shape.model.startswith("SmolLM2")
    yield rope_case(backend, shape, norms, interleaved, [(700, 1), (3, 1), (1, 1), (300, 300), (1027, 130)], device)


def _small_cases(backend: str, device: torch.device) -> Iterator[Case]:
    for size in (4096, 1024, 576, 8192):
        for tokens in (1, 300):
            yield norm_case(backend, tokens, size, _BF16, True, device)
    yield norm_case(backend, 7, 4096, _BF16, False, device)
    yield norm_case(backend, 7, 4096, _F16, True, device)
    for size in (14336, 3072, 1536):
        yield silu_case(backend, 300, size, _BF16, device)
    yield silu_case(backend, 1, 14336, _F16, device)
    mixtures = [Mixture(4096, 7168, 8, 2), Mixture(2048, 768, 128, 8)]  # Mixtral 8x7B on two ranks, Qwen3-30B-A3B
    mixtures += [mixtures[1]._replace(quantization=name) for name in ("fp8", "int4", "int8")]
    for mixture in mixtures:
        for tokens in (1, 300):
            yield experts_case(backend, mixture, tokens, _BF16, device)
    yield norm_case(backend, 300, 4096, _BF16, True, device, fp8=True)
    yield norm_case(backend, 7, 8192, _BF16, False, device, fp8=True)
    yield silu_case(backend, 300, 14336, _BF16, device, fp8=True)
    for packing in _PACKINGS:
        for tokens in (1, 17, 300):  # each has tiles of its own
            yield packed_case(backend, packing, tokens, _BF16, device)
    yield packed_case(backend, _PACKINGS[0], 5, _F16, device)
    for vocab in (128_256, 151_936):
        for rows in (1, 64):
            yield argmax_case(backend, rows, vocab, _BF16, device)
            yield mask_case(backend, rows, vocab, _BF16, device)
            yield draw_case(backend, rows, vocab, _BF16, device)
    yield argmax_case(backend, 4, 49_152, _F32, device)
    yield draw_case(backend, 16, 49_152, _F32, device)


def _tiny_cases(backend: str, device: torch.device) -> Iterator[Case]:
    rows = [(1, 1), (17, 1), (70, 1)]
    for seed, (dtype, cached) in enumerate([(_F32, _F32), (_F16, _F16), (_BF16, _FP8)]):
        shape = Shape("tiny", 4, 2, 64, dtype, cached, 16)
        yield attention_case("paged_decode", backend, shape, rows, device, seed, longest=128)
        yield attention_case("paged_prefill", backend, shape, [(9, 1), (20, 20), (40, 7)], device, seed, longest=128)
        if dtype == _F32:
            short = shape._replace(window=9)
            yield attention_case("paged_decode", backend, short, rows, device, seed, longest=128)
            yield attention_case("paged_prefill", backend, short, [(20, 20), (40, 7)], device, seed, longest=128)
            yield invariance_case(backend, shape, rows, device, seed)
        # The interpreter rounds to fp8 wrongly.
        exact = device.type != "cpu" or backend == "torch"
        kept = shape if exact else shape._replace(cached=dtype)
        yield rope_case(backend, kept, dtype == _F32, dtype == _F16, [(5, 1), (20, 20), (40, 7)], device)
        yield norm_case(backend, 3, 96, dtype, True, device)
        yield silu_case(backend, 3, 48, dtype, device)
        yield experts_case(backend, Mixture(72, 48, 6, 2), 40, dtype, device)
        yield packed_case(backend, Packing(48, 160, 4, 32, zeros=dtype == _F16), 5, dtype, device)
        if exact:
            yield norm_case(backend, 3, 96, dtype, True, device, fp8=True)
            yield silu_case(backend, 3, 48, dtype, device, fp8=True)
    yield experts_case(backend, Mixture(72, 48, 6, 2, "int4"), 40, _F32, device)
    yield norm_case(backend, 2, 64, _F32, False, device)
    yield argmax_case(backend, 3, 300, _F32, device)
    yield mask_case(backend, 3, 300, _F32, device)
    yield draw_case(backend, 9, 300, _F32, device)


def _backend_of(device: torch.device) -> str:
    if device.type != "cpu":
        return "triton"
    try:
        from realengine.kernels.interpreting import INTERPRETING
    except ImportError:
        return "torch"
    return "triton" if INTERPRETING else "torch"


def _differing(first: Outputs, second: Outputs) -> int:
    """Elements whose bits differ."""
    pairs = zip(first, second, strict=True)
    return sum(
        int((a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).view(-1, a.itemsize).any(-1).sum())
        for a, b in pairs
    )


@contextmanager
def _empty_is_nan() -> Iterator[None]:
    """Every tensor made without content holds NaN, or the largest integer; torch does so when it is deterministic."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
