"""Kernel times of a GPU under a power limit, which lowers the clock of kernels that would need more power."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tokentwin.calibration.operations import Collective, Estimate, KernelTimes, Operation
from tokentwin.calibration.trust import TrustLevel
from tokentwin.serving.deployments.gpu_spec import GpuSpec
from tokentwin.traces.metrics.power import GpuPower

_SIGMA = 0.5  # standard error of a slowdown's logarithm, as a share of that logarithm (lab/results/energy.md)
_SLOWER = 1.02  # factor beyond which a kernel counts as slowed down


@dataclass
class LimitedKernels:
    """`KernelTimes` of `gpu` with its power limited as in `power`, from its times at the board's limit."""

    gpu: GpuSpec
    unlimited: KernelTimes
    power: GpuPower

    def time(self, operation: Operation) -> Estimate:
        """Return the time of one occurrence, which is extrapolated if the limit slows the kernel down."""
        known = self.unlimited.time(operation)
        if isinstance(operation, Collective):
            return known
        seconds = np.maximum(known.ns, 1.0) / 1e9
        computing = operation.flops / self.gpu.flop_per_s(getattr(operation, "dtype", "bfloat16"))
        moving = operation.bytes / self.gpu.memory_bytes_per_s
        bound = np.minimum(computing / np.maximum(moving, 1e-12), 1.0)
        in_16_bits = operation.flops / self.gpu.bf16_flop_per_s
        slower: Any = self.power.slowdown(in_16_bits / seconds, moving / seconds, bound)
        level = np.where(slower > _SLOWER, TrustLevel.EXTRAPOLATED, known.level).astype(np.int8)
        return Estimate(known.ns * slower, np.hypot(known.sigma, _SIGMA * np.log(slower)), level)


def limited(kernels: KernelTimes, limit_w: float | None) -> KernelTimes:
    """Return `kernels` under a power limit in watts; unchanged if there is none, or if it is the board's own.

    Raises UserError for a limit that the GPU cannot have.
    """
    power = None if limit_w is None else GpuPower.from_gpu(kernels.gpu, limit_w)
    if power is None or power.limit_w == power.board_w:
        return kernels
    return LimitedKernels(kernels.gpu, kernels, power)
