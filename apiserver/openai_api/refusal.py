"""OpenAI's error document, with vLLM's error types, and the exception from which it is made."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from aiohttp import web
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tokentwin.serving.settings import remedy

_TYPES = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError", 503: "ServiceUnavailableError"}
_MALFORMED = "Bad Request"
_OF_SHAPE = ("_type", "_parsing", "_from_float", "missing", "literal_error", "json_invalid")


class Refusal(Exception):
    """A refusal of a request; `param` is the field at fault, if there is one.

    `type` defaults to vLLM's type for `status`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        retry_after_s: int | None = None,
        type: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.type = type or _TYPES.get(status) or HTTPStatus(status).phrase

    def document(self) -> dict[str, Any]:
        """Return OpenAI's error document: `error` with `message`, `type`, `param`, `code`."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.status}}


def answer_to(refusal: Refusal) -> web.Response:
    headers = {} if refusal.retry_after_s is None else {"Retry-After": str(refusal.retry_after_s)}
    return web.json_response(refusal.document(), status=refusal.status, headers=headers)


def malformed(message: str, param: str | None = None) -> Refusal:
    """Return the refusal of a body that the endpoint cannot parse; `param` is the path to the fault.

    As in vLLM, its type differs from that of a wrong value.
    """
    return Refusal(400, message, param, type=_MALFORMED)


def invalid(error: ValidationError, names: Mapping[str, str] | None = None) -> Refusal:
    """Return the refusal for the first invalid field; in a union, for the member that fits the value best.

    `names` has names by which the client knows fields of the outermost object.
    """
    errors = [
        (_renamed(_way(entry["loc"]), names or {}), entry)
        for entry in error.errors(include_url=False, include_input=False)
    ]
    of_field = [(way, entry) for way, entry in errors if way[:1] == errors[0][0][:1]]
    way = max((way for way, _ in of_field), key=len)
    nearest = [entry for other, entry in of_field if other == way]
    of_its_type = [entry for entry in nearest if not entry["type"].endswith("_type")] or nearest
    remedies = dict.fromkeys(map(remedy, of_its_type))
    field = ".".join(way)
    message = f"{field or 'the body'} {' or '.join(remedies).replace('or must be', 'or')}"
    if any(map(_is_of_shape, of_its_type)) or (way[:1] == ["prompt"] and len(way) > 1):
        return malformed(message, ".".join(["body", *way]))
    return Refusal(400, message, field or None)


def _is_of_shape(error: ErrorDetails) -> bool:
    return error["type"].endswith(_OF_SHAPE)


def _renamed(way: list[str], names: Mapping[str, str]) -> list[str]:
    return [names.get(part, part) if at == 0 else part for at, part in enumerate(way)]


def _way(place: tuple[int | str, ...]) -> list[str]:
    """Return the path to a field as names and positions, without pydantic's names for members of unions.

    Such names are types, or begin with `as ` in `tokentwin.apiserver.openai_api.protocol`.
    """
    return [str(part) for part in place if part != "str" and not str(part).startswith(("list[", "function-", "as "))]
