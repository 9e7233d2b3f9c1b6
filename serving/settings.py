"""The base of settings that people write in files and forms, and the remedies that errors state for wrong values."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer
from pydantic_core import ErrorDetails


class Settings(BaseModel):
    """The base of every group of settings. Settings are frozen, and unknown names are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class TerseSettings(Settings):
    """Settings; a setting in `seldom_set` is written to a file only if it differs from its default.

    So adding a setting does not change the recorded form of deployments that do not use it.
    """

    seldom_set: ClassVar[tuple[str, ...]] = ()

    def states(self, name: str) -> bool:
        """Return whether the setting was stated, or decided since. Otherwise engine, model or GPU may decide it."""
        return name in self.model_fields_set

    def as_stated(self) -> dict[str, Any]:
        """Return the settings that were stated, as data from which settings that state the same can be made again."""
        return self.model_dump(mode="json", exclude_unset=True)

    @model_serializer(mode="wrap")
    def _without_what_is_seldom_set(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = dump(self)
        for name in self.seldom_set:
            if name in data and getattr(self, name) == type(self).model_fields[name].default:
                del data[name]
        return data


def remedy(error: ErrorDetails) -> str:
    """Return the remedy for a validation error: what the value must be, or the message of our own validator."""
    if error["type"] in _REMEDIES:
        return _REMEDIES[error["type"]].format(**error.get("ctx", {}))
    return error["msg"].removeprefix("Value error, ")


_REMEDIES = {
    "missing": "is missing; add it",
    "extra_forbidden": "is not supported; leave it out",
    "string_type": "must be a string",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "is too large a number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "finite_number": "must be a finite number",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must match {pattern}",
    "too_short": "must not be empty",
    "too_long": "must have at most {max_length} entries",
    "literal_error": "must be {expected}",
    "json_invalid": "is not JSON: {error}",
    "string_unicode": "is not UTF-8 text",
}
