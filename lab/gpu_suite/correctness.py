"""Checks of every kernel against float64, on fresh random inputs, at the shapes at which it is run and timed.

`operations.py` defines the correct results. Memory that a kernel allocates is NaN before it runs, and so is the cache
wherever no row has written, so that missing writes and forbidden reads give NaN. Each kernel runs twice: two different
results mean a race. A case that raises an exception also gets a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import isfinite
from typing import Any

import torch

from lab.gpu_suite.attention_operations import attention, invariance, rope_store
from lab.gpu_suite.operations import (
    Mixture,
    On,
    Operation,
    Outputs,
    Packing,
    add_rms_norm,
    argmax,
    draw,
    grouped_gemm,
    packed_gemm,
    router,
    silu_mul,
    token_mask,
)
from lab.gpu_suite.ragged_batch import layer_spec
from tokentwin.realengine.kernels.launches import SHAPES, WINDOWED, Shape

_F32, _F16, _BF16, _FP8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn


def checks(device: torch.device, dry_run: bool) -> list[Callable[[], Iterator[dict[str, Any]]]]:
    """Return the checks, the kernels of the measured models first; each yields rows.

    The fields of a row are

    - kernel, case, dtype: kernel, input and dtype of the check
    - backend: "triton", or "torch" (the engine's reference operations) if Triton has no device to run on
    - error: see `relative_error`; for argmax the number of wrong rows, for draw a distance in cumulative probability,
      for repeat the number of differing elements. An error that is not a number is stored as text
    - limit: maximum error
    - ok: True if error <= limit

    `dry_run` checks a few tiny shapes, in Triton's interpreter if that is on.
    """
    backend = _backend_of(device)
    return [partial(check_case, case, backend, seed) for seed, case in enumerate(cases(device, dry_run))]


def cases(device: torch.device, dry_run: bool) -> Iterator[Operation]:
    """Yield the checked cases. On the meta device they run without computing anything."""
    on = On(device, _backend_of(device))
    yield from _tiny_cases(on) if dry_run else _cases(on)


def check_case(case: Operation, backend: str, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the row of a case and, if it ran, the row of its repeat, which must be equal bit for bit."""
    about = {"kernel": case.kernel, "case": case.case, "dtype": _name(case.dtype), "backend": backend}
    try:
        make, call, error_of = case.prepare()
        assert error_of is not None
        given = [make(seed) for _ in range(3)]  # three equal inputs, because a call may change its input
        with _empty_is_nan():
            first, second = call(*given[0]), call(*given[1])
        error = float(error_of(given[2], first))
        moved = float(_differing(first, second))
    except Exception as failure:  # whatever a kernel's launch may raise
        message = f"{type(failure).__name__}: {str(failure)[:300]}"
        yield about | {"error": message, "limit": case.limit, "ok": False}
        return
    yield about | {"error": error if isfinite(error) else str(error), "limit": case.limit, "ok": error <= case.limit}
    yield about | {"case": f"{case.case}, twice", "error": moved, "limit": 0.0, "ok": moved == 0}


# The cases


def _cases(on: On) -> Iterator[Operation]:
    shapes = sorted(SHAPES, key=lambda shape: (shape.page != 16, shape.cached == _FP8, shape.dtype != _BF16))
    for number, shape in enumerate(shapes):
        if number == 2:  # the shapes of the measured models are done
            yield from _small_cases(on)
        yield from _attention_cases(on, shape)
        norms, interleaved = shape.model.startswith("Qwen3"), shape.model.startswith("SmolLM2")
        rows = [(700, 1), (3, 1), (1, 1), (300, 300), (1027, 130)]
        yield rope_store(on, shape, layer_spec(shape, norms, interleaved), rows)
    yield from _attention_cases(on, WINDOWED._replace(window=512))  # the window is shorter than most contexts


def _attention_cases(on: On, shape: Shape) -> Iterator[Operation]:
    ragged = [(context, 1) for context in (1, 15, 16, 17, 64, 65, 129, 1000, 4097, 2500)]
    chunks = [(700, 1), (3, 1), (300, 300), (1027, 130), (65, 2), (129, 129)]
    many = [(1 + 37 * index % 901, 1) for index in range(200)]
    for rows, longest in ((ragged, 8192), (many, 1024), (chunks, 2048)):
        yield attention(on, shape, rows, longest, checked=True)
    yield invariance(on, shape, ragged)


def _small_cases(on: On) -> Iterator[Operation]:
    for size in (4096, 1024, 576, 8192):
        for tokens in (1, 300):
            yield add_rms_norm(on, tokens, size)
    yield add_rms_norm(on, 7, 4096, add=False)
    yield add_rms_norm(on, 7, 4096, _F16)
    for size in (14336, 3072, 1536):
        yield silu_mul(on, 300, size)
    yield silu_mul(on, 1, 14336, _F16)
    mixtures = [Mixture(4096, 7168, 8, 2), Mixture(2048, 768, 128, 8)]  # of Mixtral 8x7B on two ranks, of Qwen3-30B-A3B
    mixtures += [mixtures[1]._replace(quantization=name) for name in ("fp8", "int4", "int8")]
    for mixture in mixtures:
        for tokens in (1, 300):
            yield grouped_gemm(on, mixture, tokens, others=mixture.experts // 5)
    for mixture in mixtures[:2]:
        for tokens in (1, 300, 8192):
            yield router(on, mixture, tokens)
    yield add_rms_norm(on, 300, 4096, fp8=True)
    yield add_rms_norm(on, 7, 8192, add=False, fp8=True)
    yield silu_mul(on, 300, 14336, fp8=True)
    qkv, down = Packing(6144, 4096, 4, 128), Packing(4096, 14336, 4, 128, zeros=True)  # Llama-3.1-8B; `down` as in AWQ
    for packing in (qkv, down, Packing(6144, 4096, 8)):
        for tokens in (1, 17, 200, 300):  # other tile sizes, and a GEMM by cuBLAS
            yield packed_gemm(on, packing, tokens)
    yield packed_gemm(on, qkv, 5, _F16)
    for vocab in (128_256, 151_936):
        for rows in (1, 64):
            for make in (argmax, token_mask, draw):
                yield make(on, rows, vocab)
    yield argmax(on, 4, 49_152, _F32)
    yield draw(on, 16, 49_152, _F32)


def _tiny_cases(on: On) -> Iterator[Operation]:
    rows = [(1, 1), (17, 1), (70, 1)]
    for dtype, cached in [(_F32, _F32), (_F16, _F16), (_BF16, _FP8)]:
        shape = Shape("tiny", 4, 2, 64, dtype, cached, 16)
        yield attention(on, shape, rows, 128, checked=True)
        yield attention(on, shape, [(9, 1), (20, 20), (40, 7)], 128, checked=True)
        if dtype == _F32:
            for short in (rows, [(20, 20), (40, 7)]):
                yield attention(on, shape._replace(window=9), short, 128, checked=True)
            yield invariance(on, shape, rows)
        # Triton's interpreter rounds to fp8 wrongly, so results in fp8 are compared only on a GPU or with torch.
        exact = on.device.type != "cpu" or on.backend == "torch"
        kept = shape if exact else shape._replace(cached=dtype)
        spec = layer_spec(kept, norms=dtype == _F32, interleaved=dtype == _F16)
        yield rope_store(on, kept, spec, [(5, 1), (20, 20), (40, 7)])
        yield add_rms_norm(on, 3, 96, dtype)
        yield silu_mul(on, 3, 48, dtype)
        yield grouped_gemm(on, Mixture(72, 48, 6, 2), 40, dtype, others=1)
        yield router(on, Mixture(72, 48, 6, 2), 40, dtype)
        yield packed_gemm(on, Packing(48, 160, 4, 32, zeros=dtype == _F16), 5, dtype)
        if exact:
            yield add_rms_norm(on, 3, 96, dtype, fp8=True)
            yield silu_mul(on, 3, 48, dtype, fp8=True)
    yield grouped_gemm(on, Mixture(72, 48, 6, 2, "int4"), 40, _F32, others=1)
    yield add_rms_norm(on, 2, 64, _F32, add=False)
    yield argmax(on, 3, 300, _F32)
    yield token_mask(on, 3, 300, _F32)
    yield draw(on, 9, 300, _F32)


def _backend_of(device: torch.device) -> str:
    if device.type != "cpu":
        return "triton"
    try:
        from tokentwin.realengine.kernels.launches import INTERPRETING
    except ImportError:
        return "torch"
    return "triton" if INTERPRETING else "torch"


def _differing(first: Outputs, second: Outputs) -> int:
    """Return the number of elements whose bits differ."""
    pairs = zip(first, second, strict=True)
    return sum(
        int((a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).view(-1, a.itemsize).any(-1).sum())
        for a, b in pairs
    )


@contextmanager
def _empty_is_nan() -> Iterator[None]:
    """Fill every tensor made without content with NaN or the largest integer, as torch does in deterministic mode."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
