"""SwiGLU's product of the merged gate and up projections: one launch, fp32 inside, rounded once."""

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from realengine.kernels.attention_shapes import TRITON_NAME
from realengine.kernels.to_fp8 import to_fp8

if TYPE_CHECKING:
    from realengine.kernels.aot import Specialisation

_ELEMENTS_PER_THREAD = 16  # where a program does a whole row
_BLOCK = 1024  # with 4 warps, one 16-byte load each of gate and up by a thread


@triton.jit
def _silu_mul(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = columns < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + columns, mask=held, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + columns, mask=held, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    tl.store(out + row * SIZE + columns, product.to(out.dtype.element_ty), mask=held)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu of the first half of each row times the second half (Shazeer 2020): [T, 2I] contiguous to [T, I]."""
    tokens, both = gate_up.shape
    size = both // 2
    out = gate_up.new_empty(tokens, size)
    constexprs = _compiled_in(size)
    _silu_mul[(tokens, triton.cdiv(size, constexprs["BLOCK"]))](gate_up, out, **constexprs)
    return out


@triton.jit
def _silu_mul_fp8(gate_up, rows, scales, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, triton.next_power_of_2(SIZE))
    held = columns < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + columns, mask=held, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + columns, mask=held, other=0.0).to(tl.float32)
    result, quantum = to_fp8((gate * tl.sigmoid(gate) * up).to(gate_up.dtype.element_ty))
    tl.store(scales + row, quantum)
    tl.store(rows + row * SIZE + columns, result, mask=held)


def silu_mul_fp8(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """`silu_mul`, rounded to the dtype of `gate_up` and then to e4m3: [T, I], and the scales [T, 1] fp32 of rows.

    One program does a row, because its scale needs all of it.
    """
    tokens, both = gate_up.shape
    rows = gate_up.new_empty(tokens, both // 2, dtype=torch.float8_e4m3fn)
    scales = gate_up.new_empty(tokens, 1, dtype=torch.float32)
    _silu_mul_fp8[(tokens,)](gate_up, rows, scales, **_compiled_in_fp8(both // 2))
    return rows, scales


def _compiled_in(size: int) -> dict[str, Any]:
    """All of a launch that is compiled into its kernel."""
    return {"SIZE": size, "BLOCK": _BLOCK, "num_warps": 4, "num_stages": 1}


def _compiled_in_fp8(size: int) -> dict[str, Any]:
    warps = triton.next_power_of_2(size) // (32 * _ELEMENTS_PER_THREAD)
    return {"SIZE": size, "num_warps": min(max(warps, 1), 16), "num_stages": 1}


def specialisations() -> list["Specialisation"]:
    """How `silu_mul` launches its kernel for Llama-3.1-8B, Qwen3-0.6B and SmolLM2."""
    from realengine.kernels.aot import Specialisation

    found = []
    for size, dtype in [
        (1536, torch.bfloat16),
        (3072, torch.bfloat16),
        (14336, torch.bfloat16),
        (14336, torch.float16),
    ]:
        constexprs = _compiled_in(size)
        stored = "*" + TRITON_NAME[dtype]
        found.append(
            Specialisation(
                name=f"silu_mul {size} {TRITON_NAME[dtype]}",
                kernel=_silu_mul,
                signature={"gate_up": stored, "out": stored},
                num_warps=constexprs.pop("num_warps"),
                num_stages=constexprs.pop("num_stages"),
                constexprs=constexprs,
                register_ceiling=64,
                expects=("ld.global.v4.b32",),
            )
        )
    for size in (14336, 28672):
        constexprs = _compiled_in_fp8(size)
        found.append(
            Specialisation(
                name=f"silu_mul {size} bf16, to fp8",
                kernel=_silu_mul_fp8,
                signature={"gate_up": "*bf16", "rows": "*fp8e4nv", "scales": "*fp32"},
                num_warps=constexprs.pop("num_warps"),
                num_stages=constexprs.pop("num_stages"),
                constexprs=constexprs,
                register_ceiling=128,
                expects=("ld.global.v4.b32",),
            )
        )
    return found
