"""SwiGLU's product of the merged gate and up projections: one launch, fp32 inside, rounded once."""

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from realengine.kernels.attention_shapes import TRITON_NAME, shaped
from realengine.kernels.dependent_launch import dependent_launch
from realengine.kernels.specialisation import Specialisation
from realengine.kernels.to_fp8 import to_fp8

_ELEMENTS_PER_THREAD = 16  # elements if a program does a whole row
_BLOCK = 1024  # a thread of 4 warps has one 16-byte load each of gate and up


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

    With `fp8` it is rounded to the dtype of `gate_up` and then to e4m3, and one program does a row, because its scale
    needs all of it. It also returns the scales [T, 1] fp32 of rows, which without `fp8` mean nothing.
    """
    tokens, size = len(gate_up), gate_up.shape[1] // 2
    block, warps = _BLOCK, 4
    if fp8:
        block = triton.next_power_of_2(size)
        warps = min(max(block // (32 * _ELEMENTS_PER_THREAD), 1), 16)
    out = gate_up.new_empty(tokens, size, dtype=torch.float8_e4m3fn if fp8 else gate_up.dtype)
    scales = gate_up.new_empty(tokens, 1, dtype=torch.float32) if fp8 else out
    _silu_mul[tokens, triton.cdiv(size, block)](
        gate_up, out, scales, size, block, fp8, **dependent_launch(out.device), num_warps=warps, num_stages=1
    )
    return out, scales


def specialisations() -> Iterator[Specialisation]:
    """Yield the kernel for Llama-3.1-8B and 70B, Qwen3-0.6B and SmolLM2."""
    bf16, expects = torch.bfloat16, ("ld.global.v4.b32", "griddepcontrol")
    cases = [(size, bf16, False) for size in (1536, 3072, 14336)] + [(14336, torch.float16, False)]
    for size, dtype, fp8 in [*cases, (14336, bf16, True), (28672, bf16, True)]:
        name, ceiling = f"silu_mul {size} {TRITON_NAME[dtype]}{', to fp8' if fp8 else ''}", 128 if fp8 else 64
        yield Specialisation(
            name, _silu_mul, partial(silu_mul, shaped(1, 2 * size, dtype=dtype), fp8), ceiling, expects
        )
