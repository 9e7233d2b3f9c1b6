"""What people write in files and forms, as it is passed on: frozen, and without names that mean nothing."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """The base of every group of settings."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
