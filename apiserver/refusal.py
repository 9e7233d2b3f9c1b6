"""OpenAI's error document, and the one exception that becomes one."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from pydantic import ValidationError

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
    """The error document, as an answer of HTTP."""
    headers = {} if refusal.retry_after_s is None else {"Retry-After": str(refusal.retry_after_s)}
    return web.json_response(refusal.document(), status=refusal.status, headers=headers)


def invalid(error: ValidationError) -> Refusal:
    """What pydantic found, of which the first is told."""
    first = error.errors(include_url=False, include_context=False)[0]
    names = [str(part) for part in first["loc"] if part != "str" and not str(part).startswith(("list[", "function-"))]
    param = ".".join(names) or None
    if first["type"] == "extra_forbidden":
        return Refusal(400, f"{param} is not supported; leave it out", param)
    message = first["msg"].removeprefix("Value error, ")
    return Refusal(400, f"{param or 'the body'}: {message}", param)
