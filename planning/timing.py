"""What times the steps of a simulated run, as a part of what is asked."""

from __future__ import annotations

from pydantic import Field

from planning.request import Request, TimedBy
from serving.errors import UserError


class Timing(Request):
    """A calibration, or the kernel tables of a GPU; or a calibration of another engine, on this GPU.

    With a `model` of the catalogue what is served is that, on so many GPUs, with room for the longest request.
    """

    calibration: TimedBy = None
    gpu: str | None = Field(None, description="time steps by the kernel tables of this GPU")
    model: str | None = None
    tensor_parallel_size: int = Field(1, ge=1, le=64)

    def check(self) -> None:
        """Raises UserError where it is nothing."""
        if self.calibration is None and self.gpu is None:
            remedy = "give --calibration, or --gpu to simulate a GPU that was not measured"
            raise UserError("calibration", "none", remedy)
