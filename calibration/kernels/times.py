"""The interface of kernel models: the time of an operation on one GPU, and its standard error."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

from calibration.operations import Collective, Operation
from serving.deployments.gpu_spec import GpuSpec


class Estimate(NamedTuple):
    """The time of one occurrence of an operation.

    Attributes:
        ns: nanoseconds, a number or an array
        sigma: standard error of log(ns): 0.05 is about 5 %
        level: a `calibration.trust.TrustLevel`, or an array of them
    """

    ns: Any
    sigma: Any
    level: Any


class KernelTimes(Protocol):
    """Times of kernels on one GPU."""

    gpu: GpuSpec

    def time(self, operation: Operation) -> Estimate:
        """Return the time of one occurrence of `operation`.

        It is never below the roofline, which is the longer of FLOPs over peak rate and bytes over bandwidth.
        """
        ...


def floor_ns(gpu: GpuSpec, operation: Operation) -> Any:
    """Return the roofline in nanoseconds: the shortest time that the datasheet allows for `operation`."""
    if isinstance(operation, Collective):
        if operation.link is not None:
            return 1e9 * operation.sent_between_nodes / operation.link.bytes_per_s
        return 1e9 * operation.bytes / gpu.link_bytes_per_s
    rate = gpu.flop_per_s(getattr(operation, "dtype", "bfloat16"))
    return 1e9 * np.maximum(operation.flops / rate, operation.bytes / gpu.memory_bytes_per_s)


def bound_by(gpu: GpuSpec, operation: Operation, flops: float, moved_bytes: float) -> str:
    """Return what limits an operation at the roofline: `compute`, `memory`, `link` or `network`."""
    if isinstance(operation, Collective):
        return "link" if operation.link is None else "network"
    rate = gpu.flop_per_s(getattr(operation, "dtype", "bfloat16"))
    return "compute" if flops / rate > moved_bytes / gpu.memory_bytes_per_s else "memory"
