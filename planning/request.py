"""Requests as plain values: each is checked when it is made, and its JSON names the job that answers it.

Every face (the command line, the dashboard, a file, Python) makes the same requests, and nothing here knows of them.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer, model_validator

from serving.deployments.config import Deployment, with_stated_blocks
from serving.errors import UserError


class Request(BaseModel):
    """A request, or a part of one. Numbers are finite, and a field that is not known is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    def as_json(self) -> dict[str, Any]:
        """The plain JSON that makes the same request; fields that are None are left out."""
        return self.model_dump(mode="json", exclude_none=True)


def _stated(deployment: Deployment | None) -> dict[str, Any] | None:
    return None if deployment is None else deployment.model_dump(mode="json", exclude_unset=True)


# A deployment of which only what was stated is kept: the rest follows from what it is completed by.
StatedDeployment = Annotated[Deployment, AfterValidator(with_stated_blocks), PlainSerializer(_stated)]

# What times the steps of a simulation; None where a GPU's kernel tables do.
TimedBy = Annotated[
    str | None,
    Field(description="directory that `tokentwin calibrate` wrote, or your own cost model as path/to/file.py:NAME"),
]


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
