"""Kernel times of one GPU: structured times, corrected by surfaces that were fitted to a table of measurements.

Every operation gets a time; a time that the tables do not cover is marked as extrapolated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from calibration.kernels.collectives import Collectives, collectives_of
from calibration.kernels.structure import Efficiency, structure_of
from calibration.kernels.surface import Surface
from calibration.kernels.times import Estimate, KernelTimes, floor_ns
from calibration.operations import Collective, Elementwise, Operation
from calibration.trust import TrustLevel
from serving.deployments.gpu_spec import GpuSpec

_SIMILAR = {
    "fp8": ("fp8_block", "bfloat16"),
    "fp8_block": ("fp8", "bfloat16"),
    "nvfp4": ("fp8", "fp8_block", "bfloat16"),
}
_ELEMENTWISE_SIGMA = 0.3  # tables lack them: the GEMMs' launch and bandwidth stand in
_STAND_IN_SIGMA = 0.4  # the surface of another type stands in
_WHOLE = 20  # shapes of GEMMs of a whole table
_UNTABLED_SIGMA = 0.7  # no measurement of this kind of operation at all


@dataclass(frozen=True)
class KernelFit:
    """The fit of one kernel: coefficients of its structured time, and the surface of the remaining ratios."""

    efficiency: Efficiency
    surface: Surface


def fitted(gpu: GpuSpec, operation: Operation, fit: KernelFit, shape: tuple[float, ...] | None = None) -> Estimate:
    """Return the times of `operation` by `fit`, at its own shape or at `shape`; never below the roofline."""
    structure = structure_of(operation)
    sizes = [np.maximum(size, 1.0) for size in structure.sizes(operation)]
    residual = fit.surface.curve(shape or structure.shape(operation)).residual(*sizes)
    ns = structure.ns(gpu, operation, fit.efficiency) * np.exp(residual.log)
    return Estimate(np.maximum(ns, floor_ns(gpu, operation)), residual.sigma, residual.level)


@dataclass
class KernelSurfaces:
    """`KernelTimes` of `gpu` from `fits` by key (`gemm/fp8`, `decode/bfloat16`, ...).

    Attributes:
        others: makes the kernel times of operations without a fit; without it, their structure and the GEMMs'
            efficiency give them
    """

    gpu: GpuSpec
    fits: dict[str, KernelFit]
    others: Callable[[], KernelTimes] | None = None

    def time(self, operation: Operation) -> Estimate:
        if isinstance(operation, Elementwise):
            return self._elementwise(operation)
        if isinstance(operation, Collective):
            return self._collectives.time(operation)
        return self._by_type(operation, structure_of(operation).key(operation))

    def _by_type(self, operation: Operation, key: str) -> Estimate:
        """Return a time by the kernel's own fit, that of a similar type, other GPUs' fits, or structure alone."""
        fit = self.fits.get(key)
        if fit is not None:
            return fitted(self.gpu, operation, fit)
        kind, _, dtype = key.partition("/")
        similar_types = _SIMILAR.get(dtype, ("bfloat16",)) if self.gpu.has_unit_for(dtype) else ("bfloat16",)
        for similar in similar_types:
            fit = self.fits.get(f"{kind}/{similar}")
            if fit is not None:
                time = fitted(self.gpu, operation, fit)
                sigma = np.hypot(time.sigma, _STAND_IN_SIGMA)
                return Estimate(time.ns, sigma, np.full_like(time.level, TrustLevel.EXTRAPOLATED))
        return self._plain(operation) if self.others is None else self._others.time(operation)

    @cached_property
    def _others(self) -> KernelTimes:
        assert self.others is not None
        return self.others()

    @cached_property
    def _collectives(self) -> Collectives:
        return collectives_of(self.gpu)

    def _elementwise(self, operation: Elementwise) -> Estimate:
        """Return a time from the bandwidth that GEMMs reach, and launches as short as the shortest GEMM (CUDA graphs).

        Work that the all-reduce before it also does needs no launch.
        """
        efficiency = self._typical()
        launches: Any = operation.launches
        if operation.after is not None:
            launches = np.where(self._collectives.fuses(operation.after), 0, launches)
        moving = 1e9 * np.asarray(operation.bytes, dtype=np.float64) / self.gpu.memory_bytes_per_s / efficiency.memory
        ns = np.asarray(launches * efficiency.launch_ns + moving)
        level = np.full(ns.shape, TrustLevel.INTERPOLATED, dtype=np.int8)
        return Estimate(ns, np.full(ns.shape, _ELEMENTWISE_SIGMA), level)

    def _plain(self, operation: Operation) -> Estimate:
        ns = np.asarray(structure_of(operation).ns(self.gpu, operation, self._typical()), dtype=np.float64)
        ns = np.maximum(ns, floor_ns(self.gpu, operation))
        return Estimate(
            ns, np.full(ns.shape, _UNTABLED_SIGMA), np.full(ns.shape, TrustLevel.EXTRAPOLATED, dtype=np.int8)
        )

    def _typical(self) -> Efficiency:
        return self.fits["gemm/bfloat16"].efficiency


def is_whole(kernels: KernelSurfaces) -> bool:
    """Return whether the GPU has enough measured shapes to price other shapes by."""
    return len(kernels.fits["gemm/bfloat16"].surface.shapes) >= _WHOLE


def bundled(name: str) -> Path:
    """Return the path of a GPU's fit, whether it exists or not."""
    return Path(__file__).with_name("gpus") / f"{name}.parquet"


def bundled_names() -> list[str]:
    """Return the names of GPUs with a bundled fit."""
    return sorted(path.stem for path in bundled("any").parent.glob("*.parquet"))
