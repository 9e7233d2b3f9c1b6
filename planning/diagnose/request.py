"""The request of `diagnose`: the recording, the calibration or GPU that times its steps, and the latency to explain."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from tokentwin.planning.request import Request, TimedBy
from tokentwin.serving.errors import UserError

Latency = Literal["ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"]


class DiagnoseRequest(Request):
    """A recording of the real engine or the simulator; without a calibration or a GPU the answer has only symptoms.

    Attributes:
        stamp: time when the recording was last written, so that a newer one in the same place is another request
    """

    run: str
    stamp: int | None = None
    calibration: TimedBy = None
    gpu: str | None = Field(None, description="GPU to simulate; step times come from measured times of its kernels")
    peak: str | None = Field(
        None,
        description="name or YAML file of the GPU whose peak rates are 100 % in MFU and MBU; by default the run's GPU",
    )
    router: str = Field("", description="router to simulate, instead of the recorded router")
    metric: Latency | None = Field(None, description="latency whose p99 the diagnosis explains, e.g. ttft_ms")
    bounds: dict[str, float] = Field({}, description="latency bounds in ms; a p99 above its bound counts as high")

    @model_validator(mode="after")
    def _router_of_a_simulation(self) -> Self:
        if self.router and self.gpu is None and self.calibration is None:
            raise UserError("router", self.router, "needs a simulation of the run; also give a calibration or a GPU")
        return self
