"""Bytes that one element takes, by the name of its type or of the quantisation of a weight."""

from __future__ import annotations

DTYPE_BYTES = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "fp8": 1.0,
    "fp8_block": 1.0,  # without the 4-byte scale for 128 x 128 weights: 0.02 %
    "int8": 1.0,  # `weight_types.weight_width` adds scales and zero points of groups
    "int4": 0.5,
    "mxfp4": 17 / 32,  # 4 bits, and one shared 8-bit scale for 32 of them (OCP Microscaling Formats 1.0)
    "nvfp4": 9 / 16,  # 4 bits, and one 8-bit scale for 16 of them
}
