"""The shapes for which kernels are compiled ahead of time, to see their registers without a GPU.

There are models of each head dimension and group size, and one of them has each dtype and page size.
"""

from typing import NamedTuple

import torch
from torch import Tensor

TRITON_NAME = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8e4nv"}
I32, U8, I64, F32 = torch.int32, torch.uint8, torch.int64, torch.float32


def shaped(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a tensor without content: a kernel is compiled for its shape and dtype alone."""
    return torch.empty(shape, dtype=dtype, device="meta")


class Shape(NamedTuple):
    """One layer's attention: `dtype` is the queries' and the output's, `cached` the KV cache's, `page` in tokens."""

    model: str
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    cached: torch.dtype
    page: int
    window: int = 0

    @property
    def name(self) -> str:
        window = f", window {self.window}" if self.window else ""
        return f"{self.model} {TRITON_NAME[self.dtype]}, KV {TRITON_NAME[self.cached]}, page {self.page}{window}"


_MODELS = (
    ("Llama-3.1-8B", 32, 8, 128),
    ("Qwen3-0.6B", 16, 8, 128),
    ("SmolLM2-135M", 9, 3, 64),
    ("Phi-3-mini", 32, 32, 96),
    ("Qwen2.5-7B", 28, 4, 128),
)
_BF16, _FP16, _FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn

SHAPES = (
    *(Shape(*model, _BF16, cached, 16) for model in _MODELS for cached in (_BF16, _FP8)),
    *(Shape(*_MODELS[0], _FP16, cached, 16) for cached in (_FP16, _FP8)),
    *(Shape(*_MODELS[0], _BF16, cached, 128) for cached in (_BF16, _FP8)),
)
WINDOWED = Shape("Mistral-7B-v0.1", 32, 8, 128, _BF16, _BF16, 16, 4096)
