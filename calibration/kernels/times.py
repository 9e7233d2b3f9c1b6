"""How long an operation takes on one GPU, and how sure that is: the contract of kernel models."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np

from calibration.operations import Collective, Operation
from serving.deployments.gpu_spec import GpuSpec


class Coverage(IntEnum):
    """How a time was come by, from best to worst; a sum is as good as its worst part, and one of nothing is unknown."""

    UNKNOWN = -1  # no time was needed
    VALIDATED = 0  # the shape itself was measured, or the whole was held against a run
    INTERPOLATED = 1  # between measured shapes
    EXTRAPOLATED = 2  # beyond them

    @property
    def clause(self) -> str:
        """What to say of a kernel: `was measured`."""
        return {0: "was measured", 1: "lies between measured shapes", 2: "lies beyond measured shapes"}[self]


class Estimate(NamedTuple):
    """The time of one occurrence of an operation.

    ns        nanoseconds, a number or an array
    sigma     standard error of log(ns): 0.05 is about 5 %
    coverage  a `Coverage`, or an array of them
    """

    ns: Any
    sigma: Any
    coverage: Any


class KernelTimes(Protocol):
    """Times of kernels on one GPU."""

    gpu: GpuSpec

    def time(self, operation: Operation) -> Estimate:
        """One occurrence of `operation`. Never below the roofline: FLOPs over peak rate, bytes over bandwidth."""
        ...


def floor_ns(gpu: GpuSpec, operation: Operation) -> Any:
    """The roofline: no device does `operation` faster than its datasheet allows."""
    if isinstance(operation, Collective):
        if operation.link is not None:
            return 1e9 * operation.sent_between_nodes / operation.link.bytes_per_s
        return 1e9 * operation.bytes / gpu.link_bytes_per_s
    rate = gpu.flop_per_s(getattr(operation, "dtype", "bfloat16"))
    return 1e9 * np.maximum(operation.flops / rate, operation.bytes / gpu.memory_bytes_per_s)


def bound_by(gpu: GpuSpec, operation: Operation, flops: float, moved_bytes: float) -> str:
    """`compute`, `memory`, `link` or `network`: which roof is over an operation of so many FLOPs and bytes."""
    if isinstance(operation, Collective):
        return "link" if operation.link is None else "network"
    rate = gpu.flop_per_s(getattr(operation, "dtype", "bfloat16"))
    return "compute" if flops / rate > moved_bytes / gpu.memory_bytes_per_s else "memory"
