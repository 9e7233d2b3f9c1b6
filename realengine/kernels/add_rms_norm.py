"""RMSNorm of a layer's input, with the residual added first: one launch that reads and writes each tensor once.

One program does a token's row, which stays in registers from the first load to the last store.
"""

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

_ELEMENTS_PER_THREAD = 8  # one 16-byte load of a 16-bit dtype


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
    """Return the RMSNorm of `x` (Zhang and Sennrich 2019), or of `residual + x`, which overwrites `residual`.

    Args:
        x: [T, H] contiguous; `residual` likewise
        weight: [H]
        returns: [T, H] in the dtype of `x`; with `fp8` rounded to that and then to e4m3. Also the scales [T, 1] fp32 of
            its rows, which without `fp8` mean nothing

    It is computed in fp32, from the sum that is stored in `residual`, rounded to its dtype.
    """
    tokens, size = x.shape
    normed = torch.empty_like(x, dtype=torch.float8_e4m3fn if fp8 else x.dtype)
    scales = x.new_empty(tokens, 1, dtype=torch.float32) if fp8 else normed
    kept = x if residual is None else residual
    warps = min(max(triton.next_power_of_2(size) // (32 * _ELEMENTS_PER_THREAD), 1), 16)
    _add_rms_norm[(tokens,)](
        x, kept, weight, normed, scales, eps, size, residual is not None, fp8,
        **dependent_launch(x.device), num_warps=warps, num_stages=1,
    )  # fmt: skip
    return normed, scales


def specialisations() -> Iterator[Specialisation]:
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
