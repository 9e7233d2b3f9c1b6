"""What `diagnose` is asked: which recording, what may time its steps again, and which latency to explain."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from planning.request import Request, TimedBy

Latency = Literal["ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"]


class DiagnoseRequest(Request):
    """A recording of the real engine or the simulator; without a calibration or a GPU only evidence is given.

    stamp   when it was last written: a later recording at the same place is another question
    """

    run: str
    stamp: int | None = None
    calibration: TimedBy = None
    gpu: str | None = Field(None, description="time steps by the kernel tables of this GPU")
    router: str = Field("", description="use this router instead of the one in the recording")
    metric: Latency | None = Field(None, description="latency whose p99 is explained, e.g. ttft_ms")
    bounds: dict[str, float] = Field({}, description="bounds in ms by metric; a latency above its bound counts as high")
