"""Two operations on the rows of activations, each in one launch: RMSNorm with the residual, and SwiGLU's product.

Both kernels can also round their result to FP8, as `tokentwin.realengine.models.linear.round_to_fp8` does.
"""

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokentwin.realengine.kernels.launches import TRITON_NAME, Specialisation, dependent_launch, shaped

_LARGEST = tl.constexpr(448.0)  # largest e4m3 number
_LEAST = tl.constexpr(1e-12)
_NORM_ELEMENTS = 8  # one 16-byte load of a 16-bit dtype
_SILU_ELEMENTS = 16  # elements of a thread if a program computes a whole row
_SILU_BLOCK = 1024  # each thread of 4 warps has one 16-byte load of gate and one of up


@triton.jit
def to_fp8(row):
    """Return a whole row as e4m3, and the scale by which e4m3 is multiplied to give the row: largest value / 448.

    Elements beyond the end of the row must be 0.
    """
    wide = row.to(tl.float32)
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(wide), axis=0), _LEAST), _LARGEST)
    return tl.div_rn(wide, scale).to(tl.float8e4nv), scale


@triton.jit
def _add_rms_norm(
    x, residual, weight, normed, scales, eps, SIZE: tl.constexpr, ADD: tl.constexpr, FP8: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64) * SIZE
    columns = tl.arange(0, triton.next_power_of_2(SIZE))
    inside = columns < SIZE
    value = tl.load(x + row + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual + row + columns, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps)
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    result = (value * scale * factor).to(x.dtype.element_ty)
    if FP8:
        result, quantum = to_fp8(result)
        tl.store(scales + tl.program_id(0), quantum)
    tl.store(normed + row + columns, result, mask=inside)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, fp8: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the RMSNorm (Zhang and Sennrich 2019) of `x`, or of `residual + x`, which is then stored in `residual`.

    Args:
        x: [T, H] contiguous; `residual` likewise
        weight: [H]
        returns: [T, H] in the dtype of `x`; if `fp8`, rounded to that dtype and then to e4m3. Also the scales [T, 1]
            fp32 of the rows, which have no meaning without `fp8`

    The norm is computed in fp32, from the sum as it is stored in `residual`, rounded to that dtype.
    """
    tokens, size = x.shape
    normed = torch.empty_like(x, dtype=torch.float8_e4m3fn if fp8 else x.dtype)
    scales = x.new_empty(tokens, 1, dtype=torch.float32) if fp8 else normed
    kept = x if residual is None else residual
    warps = min(max(triton.next_power_of_2(size) // (32 * _NORM_ELEMENTS), 1), 16)
    _add_rms_norm[(tokens,)](
        x, kept, weight, normed, scales, eps, size, residual is not None, fp8,
        **dependent_launch(x.device), num_warps=warps, num_stages=1,
    )  # fmt: skip
    return normed, scales


def _norm_specialisations() -> Iterator[Specialisation]:
    """Yield the kernel for the hidden sizes of Llama-3.1-8B and 70B, Qwen3-0.6B and SmolLM2."""
    cases = [(size, True, torch.bfloat16, False) for size in (576, 1024, 4096, 8192)]
    cases += [(4096, False, torch.bfloat16, False), (4096, True, torch.float16, False)]
    cases += [(4096, True, torch.bfloat16, True), (8192, True, torch.bfloat16, True)]
    for size, add, dtype, fp8 in cases:
        x = shaped(1, size, dtype=dtype)
        launch = partial(add_rms_norm, x, x if add else None, x[0], 1e-5, fp8)
        kind = f"{'' if add else ', no residual'}{', to fp8' if fp8 else ''}"
        name = f"add_rms_norm {size} {TRITON_NAME[dtype]}{kind}"
        yield Specialisation(name, _add_rms_norm, launch, 64, ("ld.global.v4.b32", "griddepcontrol"))


@triton.jit
def _silu_mul(gate_up, out, scales, SIZE: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    product = (gate * tl.sigmoid(gate) * up).to(gate_up.dtype.element_ty)
    if FP8:
        product, quantum = to_fp8(product)
        tl.store(scales + row, quantum)
    tl.store(out + row * SIZE + columns, product, mask=inside)


def silu_mul(gate_up: Tensor, fp8: bool = False) -> tuple[Tensor, Tensor]:
    """Return silu of the first half of each row times the second half (Shazeer 2020): [T, 2I] contiguous to [T, I].

    If `fp8`, the product is rounded to the dtype of `gate_up` and then to e4m3, and one program computes a whole row,
    because the scale depends on all of it. The second result is the scales [T, 1] fp32 of the rows, which have no
    meaning without `fp8`.
    """
    tokens, size = len(gate_up), gate_up.shape[1] // 2
    block, warps = _SILU_BLOCK, 4
    if fp8:
        block = triton.next_power_of_2(size)
        warps = min(max(block // (32 * _SILU_ELEMENTS), 1), 16)
    out = gate_up.new_empty(tokens, size, dtype=torch.float8_e4m3fn if fp8 else gate_up.dtype)
    scales = gate_up.new_empty(tokens, 1, dtype=torch.float32) if fp8 else out
    _silu_mul[tokens, triton.cdiv(size, block)](
        gate_up, out, scales, size, block, fp8, **dependent_launch(out.device), num_warps=warps, num_stages=1
    )
    return out, scales


def _silu_specialisations() -> Iterator[Specialisation]:
    """Yield the kernel for Llama-3.1-8B and 70B, Qwen3-0.6B and SmolLM2."""
    bf16, expects = torch.bfloat16, ("ld.global.v4.b32", "griddepcontrol")
    cases = [(size, bf16, False) for size in (1536, 3072, 14336)] + [(14336, torch.float16, False)]
    for size, dtype, fp8 in [*cases, (14336, bf16, True), (28672, bf16, True)]:
        name, ceiling = f"silu_mul {size} {TRITON_NAME[dtype]}{', to fp8' if fp8 else ''}", 128 if fp8 else 64
        yield Specialisation(
            name, _silu_mul, partial(silu_mul, shaped(1, 2 * size, dtype=dtype), fp8), ceiling, expects
        )


def specialisations() -> Iterator[Specialisation]:
    """Yield the kernels of both operations."""
    yield from _norm_specialisations()
    yield from _silu_specialisations()
