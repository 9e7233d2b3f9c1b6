"""What a page asks of a job: plain values that are checked, and that name the job."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Request(BaseModel):
    """A request, or a part of one. Numbers are finite, and nothing is asked that is not known."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def as_json(self) -> dict[str, Any]:
        """The plain JSON that the job takes."""
        return self.model_dump(mode="json", exclude_none=True)
