"""What times the steps of a simulated run, as a part of a request."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from planning.request import Request, TimedBy
from serving.errors import UserError


class Timing(Request):
    """A calibration, or the kernel tables of a GPU; or a calibration of another engine, on this GPU.

    With a `model` of the catalogue what is served is that, on so many GPUs, with room for the longest request.
    """

    calibration: TimedBy = None
    gpu: str | None = Field(None, description="GPU whose kernel tables time the steps")
    model: str | None = Field(None, description="model of the catalogue to serve, where the deployment names none")
    tensor_parallel_size: int = Field(1, ge=1, le=64, description="GPUs that share each layer of --model")

    @model_validator(mode="after")
    def _size_of_a_model(self) -> Self:
        if self.model is None and self.tensor_parallel_size != 1:
            remedy = "needs --model; without it, set the size in the deployment"
            raise UserError("tensor_parallel_size", self.tensor_parallel_size, remedy)
        return self
