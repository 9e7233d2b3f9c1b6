"""OpenAI's error document, and the one exception that becomes one."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from pydantic import ValidationError

from serving.remedies import remedy

_TYPES = {
    401: "authentication_error",
    408: "timeout_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class Refusal(Exception):
    """A request that gets no answer: `param` is the field at fault, if it is one."""

    def __init__(self, status: int, message: str, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def document(self) -> dict[str, Any]:
        """As OpenAI's API words it: `error` with `message`, `type`, `param`, `code`."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}


def answer_to(refusal: Refusal) -> web.Response:
    headers = {} if refusal.retry_after_s is None else {"Retry-After": str(refusal.retry_after_s)}
    return web.json_response(refusal.document(), status=refusal.status, headers=headers)


def invalid(error: ValidationError) -> Refusal:
    """What is wrong with the first field that is; of a union's members, what is wrong with the nearest."""
    found = [(_way(each["loc"]), each) for each in error.errors(include_url=False)]
    of_field = [(way, each) for way, each in found if way[:1] == found[0][0][:1]]
    way = max((way for way, _ in of_field), key=len)
    nearest = [each for other, each in of_field if other == way]
    of_its_type = [each for each in nearest if not each["type"].endswith("_type")] or nearest
    param = ".".join(way) or None
    remedies = dict.fromkeys(map(remedy, of_its_type))
    return Refusal(400, f"{param or 'the body'} {' or '.join(remedies).replace('or must be', 'or')}", param)


def _way(place: tuple[int | str, ...]) -> list[str]:
    """The names and positions that lead to a field, without the members of unions that pydantic has among them."""
    return [str(part) for part in place if part != "str" and not str(part).startswith(("list[", "function-"))]
