"""Rounding a row of activations to FP8 where it is made, as `realengine.projection.quantised` does afterwards."""

import triton
import triton.language as tl

_LARGEST = tl.constexpr(448.0)  # of e4m3
_LEAST = tl.constexpr(1e-12)


@triton.jit
def to_fp8(row):
    """A program's whole row, 0 where it has none, as e4m3, and the scale that gives it back: largest value / 448."""
    wide = row.to(tl.float32)
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(wide), axis=0), _LEAST), _LARGEST)
    return tl.div_rn(wide, scale).to(tl.float8e4nv), scale
