"""Kernel times of a GPU: from its bundled fit, or from the fits of similar GPUs applied to its datasheet.

A GPU without a table of measurements borrows the fits of other GPUs, its donors. Every GPU with a fit of a whole table
is a donor. A donor's fit (its shares of the datasheet's rates and its surfaces) is applied to the datasheet of the GPU.
The answer is the weighted geometric mean of the donors' times, and it is always marked as extrapolated. A donor weighs
more if its datasheet is similar and if it predicts the few measured kernels of the GPU well. To measure the error of
this method, fitted GPUs were left out in turn, alone and together with all other GPUs of their chip
(`lab/benchmarks/kernel_surfaces.py`). The constants below were chosen by these errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from tokentwin.calibration.kernels.collectives import collectives_of
from tokentwin.calibration.kernels.shapes import measured_at, operation_at
from tokentwin.calibration.kernels.surfaces import KernelSurfaces, bundled, bundled_names, is_whole, read_surfaces
from tokentwin.calibration.latent_attention import HeadGemm, LatentDecode, LatentPrefill
from tokentwin.calibration.operations import (
    Collective,
    DecodeAttention,
    Elementwise,
    Estimate,
    Experts,
    Gemm,
    KernelTimes,
    Operation,
    PrefillAttention,
)
from tokentwin.calibration.trust import TrustLevel
from tokentwin.serving.deployments.gpu_spec import GpuSpec, find_gpu

_SIGMA = {  # standard error of log time by kernel, from errors for GPUs that were left out in turn
    Gemm: 0.25,
    PrefillAttention: 0.55,
    DecodeAttention: 0.4,
    HeadGemm: 0.25,
    LatentPrefill: 0.55,
    LatentDecode: 0.4,
    Experts: 0.75,
    Elementwise: 0.4,
}
_UNTABLED_SIGMA = 0.7  # standard error of log time if no GPU has tables of the operation
_LEAST_NS = 1e-6  # smaller than any time, so that a time of 0 has a logarithm
_NEAR = 1.0  # distance (octaves of bandwidth, rate or SMs) at which a donor's weight falls to 0.61
_OTHER_GENERATION = 1.0  # octaves that a different generation adds
_RIGHT = 0.2  # root mean square error of log time at measured kernels at which a donor's weight falls to 0.61


@dataclass
class TransferredKernels:
    """`KernelTimes` of `gpu` from `donors`, which are fits of other GPUs on `gpu`'s datasheet; `weights` sum to 1."""

    gpu: GpuSpec
    donors: tuple[KernelSurfaces, ...]
    weights: NDArray[np.float64]

    @classmethod
    def to(cls, gpu: GpuSpec, anchors: KernelSurfaces | None = None, without: Sequence[str] = ()) -> TransferredKernels:
        """Make kernel times from the bundled fits of whole tables, without the GPUs named in `without`.

        `anchors` is a fit of a few measured shapes of `gpu`.
        """
        names = [name for name in bundled_names() if name not in {gpu.name, *without}]
        whole = [fit for fit in map(_bundled_fit, names) if is_whole(fit)]
        donors = tuple(replace(fit, gpu=gpu) for fit in whole)
        logs = np.array([_likeness(gpu, fit.gpu) for fit in whole])
        if anchors is not None:
            logs -= np.array([_mean_square(anchors, donor) for donor in donors]) / (2 * _RIGHT**2)
        weights = np.exp(logs - logs.max())
        return cls(gpu, donors, weights / weights.sum())

    def time(self, operation: Operation) -> Estimate:
        if isinstance(operation, Collective):
            return collectives_of(self.gpu).time(operation)
        times = np.array([donor.time(operation).ns for donor in self.donors])
        logs = np.log(np.maximum(times, _LEAST_NS))
        mean = np.tensordot(self.weights, logs, axes=1)
        ns = np.where(times.any(axis=0), np.exp(mean), 0.0)  # an empty operation takes no time
        apart = np.sqrt(np.tensordot(self.weights, np.square(logs - mean), axes=1))
        sigma = np.hypot(_SIGMA.get(type(operation), _UNTABLED_SIGMA), apart)
        return Estimate(ns, sigma, np.full(ns.shape, TrustLevel.EXTRAPOLATED, dtype=np.int8))


@cache
def _bundled_fit(name: str) -> KernelSurfaces:
    """Return the bundled fit of a GPU, which is read once however many GPUs borrow it."""
    return read_surfaces(bundled(name), find_gpu(name))


def _likeness(gpu: GpuSpec, donor: GpuSpec) -> float:
    """Return a donor's log weight: a Gaussian of the distance between the two datasheets in octaves."""
    rates = [(g.memory_bytes_per_s, g.bf16_flop_per_s, g.sm_count) for g in (gpu, donor)]
    octaves = np.log2(rates[0]) - np.log2(rates[1])
    other = _OTHER_GENERATION * (gpu.generation != donor.generation)
    return float(-(octaves @ octaves + other**2) / (2 * _NEAR**2))


def _mean_square(anchors: KernelSurfaces, donor: KernelSurfaces) -> float:
    """Return the mean square error of a donor's log times at all measured shapes and sizes of `anchors`.

    Every kernel has the same weight.
    """
    squares = []
    for key, fit in anchors.fits.items():
        misses = []
        for number, shape in enumerate(np.exp2(fit.surface.shapes).tolist()):
            sizes, ns = measured_at(anchors.gpu, key, fit, number)
            predicted = donor.time(operation_at(key, shape, sizes)).ns
            misses.append(np.nanmean(np.square(np.log(predicted / ns))))
        squares.append(float(np.mean(misses)))
    return float(np.mean(squares))


def load_kernels(gpu: GpuSpec) -> KernelTimes:
    """Return the kernel times of `gpu` from its bundled fit, or from other GPUs' fits (all extrapolated).

    If the bundled fit has only a few shapes, other kernels come from other GPUs, weighted by their errors at these
    shapes.
    """
    if gpu.name not in bundled_names():
        return TransferredKernels.to(gpu)
    kernels = read_surfaces(bundled(gpu.name), gpu)
    return kernels if is_whole(kernels) else replace(kernels, others=partial(TransferredKernels.to, gpu, kernels))
