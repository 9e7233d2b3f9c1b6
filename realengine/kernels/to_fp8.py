"""Rounding of a row of activations to FP8 in the kernel that makes it, as `realengine.projection.quantised` does it."""

import triton
import triton.language as tl

_LARGEST = tl.constexpr(448.0)  # largest of e4m3
_LEAST = tl.constexpr(1e-12)


@triton.jit
def to_fp8(row):
    """Return a program's whole row as e4m3, and the scale that gives it back: largest value / 448.

    The row is 0 where the program has no value.
    """
    wide = row.to(tl.float32)
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(wide), axis=0), _LEAST), _LARGEST)
    return tl.div_rn(wide, scale).to(tl.float8e4nv), scale
