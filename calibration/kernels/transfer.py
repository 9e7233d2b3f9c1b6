"""A GPU that nobody tabulated: other GPUs' kernels on its datasheet.

Every GPU with a fit predicts how long it would take with this datasheet: its own shares of the rates, its own
surfaces. Their geometric mean is the answer, marked as extrapolated throughout. Its error was measured by leaving each
fitted GPU out in turn (benchmarks/kernel_surfaces.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from calibration.kernels.collectives import collectives_of
from calibration.kernels.surface_file import read_surfaces
from calibration.kernels.surfaces import KernelSurfaces, bundled, bundled_names, is_whole
from calibration.kernels.times import Coverage, Estimate
from calibration.latent_attention import HeadGemm, LatentDecode, LatentPrefill
from calibration.operations import Collective, DecodeAttention, Elementwise, Experts, Gemm, Operation, PrefillAttention
from serving.deployments.gpu_spec import GpuSpec, find_gpu

_SIGMA = {  # of log time, by type of operation: 90 % of the errors of GPUs left out in turn lie within 1.645 of it
    Gemm: 0.25,
    PrefillAttention: 0.55,
    DecodeAttention: 0.4,
    HeadGemm: 0.25,
    LatentPrefill: 0.55,
    LatentDecode: 0.4,
    Experts: 0.75,
    Elementwise: 0.4,
}
_UNTABLED_SIGMA = 0.7  # of what no GPU has tables
_LEAST_NS = 1e-6  # below any time, so that nothing has a logarithm


@dataclass
class TransferredKernels:
    """`KernelTimes` of `gpu` by `donors`: fits of other GPUs, each put on `gpu`'s datasheet."""

    gpu: GpuSpec
    donors: tuple[KernelSurfaces, ...]

    @classmethod
    def to(cls, gpu: GpuSpec) -> TransferredKernels:
        """From every bundled fit of a whole table."""
        fitted = [read_surfaces(bundled(name), find_gpu(name)) for name in bundled_names()]
        return cls(gpu, tuple(replace(kernels, gpu=gpu) for kernels in fitted if is_whole(kernels)))

    def time(self, operation: Operation) -> Estimate:
        if isinstance(operation, Collective):
            return collectives_of(self.gpu).time(operation)
        times = np.array([donor.time(operation).ns for donor in self.donors])
        logs = np.log(np.maximum(times, _LEAST_NS))
        ns = np.where(times.any(axis=0), np.exp(logs.mean(axis=0)), 0.0)  # nothing takes no time
        sigma = np.hypot(_SIGMA.get(type(operation), _UNTABLED_SIGMA), logs.std(axis=0))
        return Estimate(ns, sigma, np.full(ns.shape, Coverage.EXTRAPOLATED, dtype=np.int8))
