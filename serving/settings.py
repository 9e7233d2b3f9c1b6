"""Settings that people write in files and forms, as they are passed on: frozen, and without unknown names."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer


class Settings(BaseModel):
    """The base of every group of settings."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class TerseSettings(Settings):
    """Settings of which some are written only if they differ from the default.

    Recordings made before these settings existed stay the same.
    """

    seldom_set: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _without_what_is_seldom_set(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = dump(self)
        for name in self.seldom_set:
            if name in data and getattr(self, name) == type(self).model_fields[name].default:
                del data[name]
        return data
