"""Where the kernel times of a GPU come from: its bundled fit, or what other GPUs' fits make of its datasheet."""

from __future__ import annotations

from calibration.kernels.surface_file import read_surfaces
from calibration.kernels.surfaces import bundled, bundled_names
from calibration.kernels.times import KernelTimes
from calibration.kernels.transfer import TransferredKernels
from serving.deployments.gpu_spec import GpuSpec


def load_kernels(gpu: GpuSpec) -> KernelTimes:
    """Kernel times of `gpu`: its bundled fit, or other GPUs' kernels on its datasheet, all of it extrapolated."""
    return read_surfaces(bundled(gpu.name), gpu) if gpu.name in bundled_names() else TransferredKernels.to(gpu)
