"""Kernel times of an engine whose kernels for weights in fp8 are no faster than those for 16 bits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tokentwin.calibration.operations import Estimate, Experts, Gemm, KernelTimes, Operation
from tokentwin.serving.deployments.gpu_spec import GpuSpec


@dataclass
class SixteenBitKernels:
    """`KernelTimes` of `gpu` in which weights in fp8 take the time of weights in 16 bits, from the times `known`."""

    gpu: GpuSpec
    known: KernelTimes

    def time(self, operation: Operation) -> Estimate:
        """Return the time of one occurrence."""
        if isinstance(operation, Gemm | Experts) and operation.dtype.startswith("fp8"):
            operation = replace(operation, dtype="bfloat16", width=0.0)
        return self.known.time(operation)
