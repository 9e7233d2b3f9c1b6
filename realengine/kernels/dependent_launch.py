"""Programmatic dependent launch: a kernel's programs are set up while the kernel before it ends, and wait for it.

It works from sm_90 on, if Triton has it. Every program of such a kernel waits before it reads or writes anything, so
that when the kernel is done, all before it are. Triton's interpreter has no such instruction, and runs without it.
"""

from functools import cache
from typing import Any

import torch
import triton.language as tl
from triton.backends.nvidia.compiler import CUDAOptions

from realengine.kernels.interpreting import INTERPRETING

_HAS = "launch_pdl" in CUDAOptions.__dataclass_fields__ and hasattr(tl.extra.cuda, "gdc_wait") and not INTERPRETING
_FIRST_CAPABILITY = (9, 0)


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
