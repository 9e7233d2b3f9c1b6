"""OpenAI's error document, and the one exception that becomes one."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from pydantic import ValidationError
from pydantic_core import ErrorDetails

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
    remedies = dict.fromkeys(map(_remedy, of_its_type))
    return Refusal(400, f"{param or 'the body'} {' or '.join(remedies).replace('or must be', 'or')}", param)


def _way(place: tuple[int | str, ...]) -> list[str]:
    """The names and positions that lead to a field, without the members of unions that pydantic has among them."""
    return [str(part) for part in place if part != "str" and not str(part).startswith(("list[", "function-"))]


def _remedy(error: ErrorDetails) -> str:
    kind, bounds = error["type"], error.get("ctx", {})
    if kind in _REMEDIES:
        return _REMEDIES[kind].format(**bounds)
    return error["msg"].removeprefix("Value error, ")


_REMEDIES = {
    "missing": "is missing; add it",
    "extra_forbidden": "is not supported; leave it out",
    "string_type": "must be a string",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "finite_number": "must be a finite number",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must not be empty",
    "too_long": "must have at most {max_length} entries",
    "literal_error": "must be {expected}",
    "json_invalid": "is not JSON: {error}",
    "string_unicode": "is not UTF-8 text",
}
