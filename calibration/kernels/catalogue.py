"""The source of a GPU's kernel times: its bundled fit, or the fits of similar GPUs applied to its datasheet."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from calibration.kernels.surface_file import read_surfaces
from calibration.kernels.surfaces import bundled, bundled_names, is_whole
from calibration.kernels.times import KernelTimes
from calibration.kernels.transfer import TransferredKernels
from serving.deployments.gpu_spec import GpuSpec


def load_kernels(gpu: GpuSpec) -> KernelTimes:
    """Return the kernel times of `gpu`: its bundled fit, or other GPUs' kernels on its datasheet, all extrapolated.

    A fit of a few shapes takes its other kernels from other GPUs, and weights these GPUs by its own measurements.
    """
    if gpu.name not in bundled_names():
        return TransferredKernels.to(gpu)
    kernels = read_surfaces(bundled(gpu.name), gpu)
    return kernels if is_whole(kernels) else replace(kernels, others=partial(TransferredKernels.to, gpu, kernels))
