"""The launch of kernels: under the interpreter or on a GPU, beside the kernel before, and compiled ahead of time.

Triton's interpreter has bf16 arithmetic that is silently wrong, so under it everything is computed in fp32.

Programmatic dependent launch: a kernel's programs are set up while the kernel before it ends, and wait for it. It works
from sm_90 on, if Triton has it. Every program of such a kernel waits before it reads or writes anything, so that when
the kernel is done, all before it are. The interpreter has no such instruction, and runs without it.

Kernels are compiled ahead of time, to see their registers without a GPU, for models of each head dimension and group
size. One of them has each dtype and page size.
"""

from collections.abc import Callable
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
TRITON_NAME = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8e4nv"}
I32, U8, I64, F32 = torch.int32, torch.uint8, torch.int64, torch.float32


def compute_dtype(dtype: torch.dtype) -> tl.dtype:
    """Return the dtype in which a kernel over activations of `dtype` computes (its COMPUTE)."""
    return tl.float32 if INTERPRETING else _COMPUTE[dtype]


def dependent_launch(device: torch.device) -> dict[str, Any]:
    """Return the arguments of a launch on `device`: the kernel's PDL, and Triton's option.

    On other devices than a GPU nothing runs, and kernels are compiled for an H100 or H200.
    """
    if _HAS and (device.type != "cuda" or _capability(device.index) >= _FIRST_CAPABILITY):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@cache
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


class Specialisation(NamedTuple):
    """One kernel as it is launched.

    Attributes:
        launch: calls the kernel's launcher with tensors on torch's meta device, which are shapes and dtypes
        register_ceiling: most registers that a thread may use: more would mean fewer programs at once on a
            multiprocessor
        expects: strings that its PTX must contain, as "wgmma" or "cp.async"
        which: number, from 0, among the launches of the kernel by the launcher
        stack_ceiling: most bytes of a thread's memory that registers may be spilled to
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
