"""The electric power of a GPU during a step, from the FLOPs and bytes of the step.

The model is the energy roofline: a constant power, an energy for every byte and an energy for every FLOP (Choi, Bedard,
Fowler and Vuduc, "A roofline model of energy", IPDPS 2013), up to the power limit of the board (Choi, Dukhan, Liu and
Vuduc, "Algorithmic time, energy, and power on candidate HPC compute building blocks", IPDPS 2014). Its coefficients are
shares of the board's power limit. They were fitted to the power that ML.ENERGY measured on a GPU of three generations
(`lab/energy`).

A lower power limit lowers the clock, and with it the voltage and the energy of the same work. How far is fitted to
published runs with power limits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tokentwin.serving.deployments.gpu_spec import GpuSpec
from tokentwin.serving.errors import UserError


class Coefficients(NamedTuple):
    """Shares of the board's limit: while a step runs, and in addition at full bandwidth and at the 16-bit peak rate."""

    running: float
    moving: float
    computing: float


IDLE = 0.12  # share of the board's limit without a step: 62 W of an A100 80 GB, 80 W of an H200
FITTED = {
    "Ampere": Coefficients(0.12, 0.75, 2.45),
    "Hopper": Coefficients(0.32, 0.56, 0.89),
    "Blackwell": Coefficients(0.24, 0.94, 1.65),
}
OTHERS = Coefficients(0.26, 0.76, 1.07)  # for other generations: fitted to all runs
LEAST_LIMIT = 0.4  # share of the board's limit; hardly any published run that we compare had a lower power limit
_FIXED, _EXPONENT = 0.57, 6  # energy of the same work at a clock r, relative to full clock: F + (1 - F) r^6
_LEAST_CLOCK = 0.2  # relative to full clock
_HALVINGS = 30


@dataclass(frozen=True)
class GpuPower:
    """The power of one GPU.

    Attributes:
        board_w: limit of the board's power in watts
        limit_w: power limit that is set (`nvidia-smi --power-limit`), at most `board_w`
    """

    board_w: float
    limit_w: float
    coefficients: Coefficients = OTHERS

    @classmethod
    def from_gpu(cls, gpu: GpuSpec, limit_w: float | None = None) -> GpuPower | None:
        """Return the power of `gpu` with a power limit; None if its board's limit is not known.

        Raises UserError for a limit that the GPU cannot have, or on a GPU whose board's limit is not known.
        """
        if gpu.power_w is None:
            if limit_w is None:
                return None
            raise UserError("power_limit_w", limit_w, f"needs the power of {gpu.name}; add power_w to the GPU's file")
        least = LEAST_LIMIT * gpu.power_w
        if limit_w is not None and not least <= limit_w <= gpu.power_w:
            remedy = f"must be from {least:g} to {gpu.power_w:g} on {gpu.name}"
            raise UserError("power_limit_w", limit_w, f"{remedy} (40 to 100 % of the board's limit)")
        return cls(gpu.power_w, limit_w or gpu.power_w, FITTED.get(gpu.generation, OTHERS))

    @property
    def idle_w(self) -> float:
        return IDLE * self.board_w

    def watts(self, computing: Any, moving: Any) -> Any:
        """Return the power while a step runs, by its shares of the 16-bit peak rate and of the memory bandwidth."""
        return np.minimum(self.board_w * self._share(computing, moving), self.limit_w)

    def _share(self, computing: Any, moving: Any) -> Any:
        own = self.coefficients
        return np.minimum(own.running + own.computing * np.asarray(computing) + own.moving * np.asarray(moving), 1.0)

    def slowdown(self, computing: Any, moving: Any, compute_bound: Any) -> Any:
        """Return the factor by which the power limit lengthens a kernel.

        `computing` and `moving` are as for `watts`, at the board's limit. `compute_bound` is the share of the time that
        depends on the clock: at a clock r, the time is 1 + share * (1 / r - 1) as long (Hsu and Kremer, PLDI 2003). The
        clock is the highest at which the kernel stays within the limit.
        """
        wanted = self._share(computing, moving) - IDLE
        allowed = self.limit_w / self.board_w - IDLE
        low, high = np.full_like(wanted, _LEAST_CLOCK), np.ones_like(wanted)
        for _ in range(_HALVINGS):
            clock = (low + high) / 2
            energy = _FIXED + (1.0 - _FIXED) * clock**_EXPONENT
            within = wanted * energy <= allowed * (1.0 + compute_bound * (1.0 / clock - 1.0))
            low, high = np.where(within, clock, low), np.where(within, high, clock)
        clock = np.where(wanted <= allowed, 1.0, low)
        return 1.0 + compute_bound * (1.0 / clock - 1.0)
