"""Kernel times of a CPU by the roofline alone (Williams et al. 2009): there are no tables of CPUs.

Only the balance matters, the number of FLOPs in the time of one byte, because a calibration corrects the times of
reading weights and of computing separately. `BALANCES` are the ones that a calibration tries.
"""

from __future__ import annotations

import numpy as np

from tokentwin.calibration.operations import Estimate, Operation, floor_ns
from tokentwin.calibration.trust import TrustLevel
from tokentwin.serving.deployments.gpu_spec import GpuSpec

BALANCES = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
_BYTES_PER_S = 1e10  # of the order of one core; a calibration corrects it


class CpuRoofline:
    """`KernelTimes` of a CPU that computes `balance` FLOPs in the time in which it reads a byte."""

    def __init__(self, balance: float) -> None:
        nothing = {"price_as_of": "", "price_source": "", "source": "assumed; a calibration corrects it"}
        self.gpu = GpuSpec(
            name="cpu", memory_bytes=1 << 34, memory_bytes_per_s=_BYTES_PER_S, bf16_flop_per_s=balance * _BYTES_PER_S,
            sm_count=1, link_bytes_per_s=_BYTES_PER_S, pcie_bytes_per_s=_BYTES_PER_S, usd_per_hour=0.0, **nothing,
        )  # fmt: skip

    def time(self, operation: Operation) -> Estimate:
        ns = np.asarray(floor_ns(self.gpu, operation), dtype=np.float64)
        return Estimate(ns, np.zeros(ns.shape), np.full(ns.shape, TrustLevel.INTERPOLATED, dtype=np.int8))
