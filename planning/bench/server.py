"""What a client can ask a server before a benchmark: its models, and the fields beyond OpenAI's API that it accepts."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from tokentwin.planning.bench.answer_stream import refusal
from tokentwin.planning.bench.request import BenchTarget
from tokentwin.serving.errors import UserError, reason

_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_PROBE_S = 60.0
_AGAIN_S = 0.2
# Fields that a server need not know, and what is lost without each.
_WISHES: dict[str, tuple[Any, str]] = {
    "ignore_eos": (True, "answers may end before their length in the trace"),
    "return_token_ids": (True, "a chunk with text counts as one token, and later turns cannot quote answers exactly"),
    "stream_options": ({"include_usage": True}, "lengths of prompts and answers are the trace's and the chunks'"),
}


@dataclass(frozen=True)
class Server:
    """The URL to send requests to, the fields of every request, and the server's facts about itself."""

    url: str
    fields: dict[str, Any]
    about: dict[str, Any]

    @property
    def model(self) -> str:
        """The name of the model to ask for."""
        return str(self.fields["model"])


async def meet(
    session: aiohttp.ClientSession,
    target: BenchTarget,
    model: str | None,
    prompt: dict[str, Any],
    say: Callable[[str], None],
) -> Server:
    """Send a short `prompt` to the server at `target`, before anything is measured, and return the server.

    If `model` is None, the first model that the server lists is used. `say` is called with a line for each field that
    the server refuses. Raises UserError if it does not answer, or refuses even the plain request.
    """
    parts = urlsplit(target.url)
    about: dict[str, Any] = {"url": parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()}  # no password
    version = await _get(session, target, "/version")
    if isinstance(version, dict):
        about["server"] = version.get("version")
    listed = await _get(session, target, "/v1/models")
    models = [entry for entry in (listed or {}).get("data") or () if isinstance(entry, dict) and "id" in entry]
    about["models"] = [{name: entry.get(name) for name in ("id", "owned_by", "max_model_len")} for entry in models]
    if model is None and not models:
        raise UserError("model", None, f"is missing; {target.url} lists no models; give the name of the server's model")
    url = target.url + _PATHS[target.endpoint]
    fields = {"model": model or models[0]["id"], "stream": True, "temperature": 0.0}
    wishes = {name: value for name, (value, _) in _WISHES.items()}
    while (refused := await _probe(session, url, {**fields, **wishes, **prompt, "max_tokens": 1}, target)) is not None:
        unknown = next((name for name in wishes if name in refused), None)
        if unknown is None:
            raise UserError("url", url, f"refuses a request: {refused}")
        del wishes[unknown]
        say(f"the server does not take {unknown}: {_WISHES[unknown][1]}")
    about["wishes"] = sorted(wishes)
    return Server(url, {**fields, **wishes}, about)


async def _get(session: aiohttp.ClientSession, target: BenchTarget, path: str) -> Any:
    """Return the JSON document at `path`; None if the server has none. Raises UserError if no server answers."""
    until = monotonic() + _PROBE_S
    try:
        while True:
            async with session.get(target.url + path, timeout=aiohttp.ClientTimeout(_PROBE_S)) as response:
                if response.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                    raise UserError("api-key", None, f"is refused by {target.url}; give the server's API key")
                if response.status != HTTPStatus.SERVICE_UNAVAILABLE or monotonic() > until:
                    return await response.json(content_type=None) if response.ok else None
            await asyncio.sleep(_AGAIN_S)  # the server is starting
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise UserError("url", target.url, f"does not answer ({_why(error)}); is the server up?") from None
    except ValueError:
        return None


async def _probe(session: aiohttp.ClientSession, url: str, body: dict[str, Any], target: BenchTarget) -> str | None:
    """Return the reason why the server refuses this request; None if the server accepts it."""
    try:
        timeout = aiohttp.ClientTimeout(target.timeout_s)
        async with session.post(url, json=body, timeout=timeout, allow_redirects=False) as response:
            data = await response.read()
            if response.status < HTTPStatus.MULTIPLE_CHOICES:
                return None
            moved = f"it is at {response.headers['Location']}" if "Location" in response.headers else response.reason
            return f"{response.status} {refusal(data) or moved}"
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise UserError("url", url, f"does not answer ({_why(error)}); is the server up?") from None


def _why(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        error = error.certificate_error
    elif isinstance(error, aiohttp.ClientConnectorError):
        error = error.os_error
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, OSError) and error.errno and error.errno > 0 and not isinstance(error, ssl.SSLError):
        return reason(error)
    return " ".join(str(error).split()) or type(error).__name__
