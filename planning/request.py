"""Requests as plain values: a request is checked when it is made, and its JSON identifies the job that answers it.

The command line, the dashboard, files and Python all make the same requests, and nothing here depends on them.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer, model_validator

from tokentwin.serving.deployments.config import Deployment, with_stated_blocks
from tokentwin.serving.errors import UserError


class Request(BaseModel):
    """A request, or a part of a request. Numbers must be finite, and unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    def as_json(self) -> dict[str, Any]:
        """Return the plain JSON that makes the same request; fields that are None are left out."""
        return self.model_dump(mode="json", exclude_none=True)


def _stated(deployment: Deployment | None) -> dict[str, Any] | None:
    return None if deployment is None else deployment.as_stated()


# A deployment that keeps only the stated settings. The others are filled in later from another deployment.
StatedDeployment = Annotated[Deployment, AfterValidator(with_stated_blocks), PlainSerializer(_stated)]

# The calibration or cost model that times the steps of a simulation; None if a GPU's kernel tables time them.
TimedBy = Annotated[
    str | None,
    Field(description="directory that `tokentwin calibrate` wrote, or your own cost model as path/to/file.py:NAME"),
]

Pue = Annotated[
    float | None,
    Field(
        ge=1,
        le=10,
        description="power usage effectiveness of the data centre, which multiplies power, energy and carbon; by "
        "default they are those of the GPUs alone",
    ),
]
GridCarbon = Annotated[
    float | None,
    Field(ge=0, le=10_000, description="carbon intensity of the grid in gCO2 per kWh, for the carbon of the energy"),
]


class Timing(Request):
    """The source of step times: a calibration, a GPU's kernel tables, or a calibration of another engine on this GPU.

    If a `model` of the catalogue is given, it is served on `tensor_parallel_size` GPUs, with room for the longest
    request.
    """

    calibration: TimedBy = None
    gpu: str | None = Field(None, description="GPU to simulate; step times come from measured times of its kernels")
    model: str | None = Field(None, description="model of the catalogue to serve, if the deployment names no model")
    tensor_parallel_size: int = Field(1, ge=1, le=64, description="GPUs that share each layer of --model")

    @model_validator(mode="after")
    def _size_of_a_model(self) -> Self:
        if self.model is None and self.tensor_parallel_size != 1:
            remedy = "needs --model; without it, set the size in the deployment"
            raise UserError("tensor_parallel_size", self.tensor_parallel_size, remedy)
        return self
