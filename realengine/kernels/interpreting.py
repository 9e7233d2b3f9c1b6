"""A flag whether Triton's interpreter runs the kernels, and the dtype that they then compute in.

The interpreter's bf16 arithmetic is silently wrong, so under it everything is computed in fp32.
"""

import torch
import triton
import triton.language as tl

INTERPRETING: bool = triton.knobs.runtime.interpret

_COMPUTE = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def compute_dtype(dtype: torch.dtype) -> tl.dtype:
    """Return the dtype in which a kernel over activations of `dtype` computes (its COMPUTE)."""
    return tl.float32 if INTERPRETING else _COMPUTE[dtype]
