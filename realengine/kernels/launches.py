"""The launch of kernels: with Triton's interpreter or on a GPU, overlapped with the kernel before, and ahead of time.

The bf16 arithmetic of Triton's interpreter is silently wrong, so everything is computed in fp32 there.

With programmatic dependent launch (PDL), the programs of a kernel start while the kernel before it ends, and wait for
its end. PDL works from sm_90 on, if Triton supports it. Every program of such a kernel waits before it reads or writes
anything. So when the kernel has ended, all kernels before it have ended, too. The interpreter has no such instruction,
and runs without PDL.

Kernels are compiled ahead of time, so that their use of registers can be checked without a GPU. They are compiled for
models with each head dimension and group size, and for one of these models with each dtype and page size.
"""

from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.nvidia.compiler import CUDAOptions
from triton.runtime import JITFunction

INTERPRETING: bool = triton.knobs.runtime.interpret

_COMPUTE = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_HAS = "launch_pdl" in CUDAOptions.__dataclass_fields__ and hasattr(tl.extra.cuda, "gdc_wait") and not INTERPRETING
_FIRST_CAPABILITY = (9, 0)
COMPILED_FOR: ContextVar[tuple[int, int]] = ContextVar("COMPILED_FOR", default=(9, 0))  # ahead of time: H100 and H200
TRITON_NAME = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8e4nv"}
I32, U8, I64, F32 = torch.int32, torch.uint8, torch.int64, torch.float32


def compute_dtype(dtype: torch.dtype) -> tl.dtype:
    """Return the dtype in which a kernel over activations of `dtype` computes (its COMPUTE)."""
    return tl.float32 if INTERPRETING else _COMPUTE[dtype]


def dependent_launch(device: torch.device) -> dict[str, Any]:
    """Return the arguments of a launch on `device` that switch PDL on or off, in the kernel and in Triton.

    Triton's interpreter, which runs kernels on the CPU, gets no PDL.
    """
    if _HAS and capability(device) >= _FIRST_CAPABILITY:
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU; of another device, that for which kernels are compiled ahead of time."""
    return _of_gpu(device.index) if device.type == "cuda" else COMPILED_FOR.get()


@cache
def _of_gpu(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


class Specialisation(NamedTuple):
    """A kernel with the arguments of one launch, to be compiled ahead of time.

    Attributes:
        launch: function that calls the kernel's launcher with tensors on torch's meta device, which have only shapes
            and dtypes
        register_ceiling: maximum number of registers of a thread; with more, fewer programs would run at once on a
            multiprocessor
        expects: strings that the kernel's PTX must contain, such as "wgmma" or "cp.async"
        which: index of this launch among the launches of the kernel that the launcher makes
        stack_ceiling: maximum number of bytes of registers that a thread may spill to memory
    """

    name: str
    kernel: JITFunction
    launch: Callable[[], object]
    register_ceiling: int
    expects: tuple[str, ...]
    which: int = 0
    stack_ceiling: int = 0


def shaped(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a tensor without content: a kernel is compiled for its shape and dtype alone."""
    return torch.empty(shape, dtype=dtype, device="meta")


class Shape(NamedTuple):
    """A layer's attention: `dtype` is that of queries and output, `cached` that of the KV, `page` is in tokens."""

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
