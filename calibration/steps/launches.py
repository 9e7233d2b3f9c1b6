"""The host's launches of a step that runs kernel by kernel: how many there are, and what they take at the least.

While the device works on one kernel the host launches the next, so launches cost nothing as long as the device is the
slower of the two. A step of little work waits for the host: it takes as long as its launches do. In a CUDA graph all
of them are one, which is in what measured steps teach.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from calibration.operations import Operation

LAUNCH_NS = 28_000
"""Host time per kernel of an engine written in Python, all that it does around a launch included. A decode step of
Llama-3-8B, batch 1, took 8.23 ms without graphs and 7.35 with them (sgl-project/sglang pull request 1401, FlashInfer,
2024-09); it has 293 kernels as they are counted here. The launch alone is a tenth of that. Other engines: 16,000 in
C++ (Qwen3-0.6B, 4.20 ms, xLLM-AI/xllm pull request 713), 80,000 (Qwen2.5-Omni-7B, 22 ms, vllm-project/vllm-omni issue
7960)."""
LAUNCH_SIGMA = 0.6  # standard error of its logarithm: what those are apart


def launches(operations: Iterable[Operation]) -> Any:
    """Kernels of a step of `operations`: one for each occurrence, or as many as it says."""
    return sum(
        np.where(np.asarray(operation.size) > 0, operation.count * getattr(operation, "launches", 1), 0)
        for operation in operations
    )
