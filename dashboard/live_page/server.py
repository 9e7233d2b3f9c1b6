"""A client of a running server, which reads its metrics, a streamed answer, and the trace of the answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from prometheus_client.parser import text_string_to_metric_families

from tokentwin.dashboard.live_page.snapshot import Snapshot
from tokentwin.serving.errors import UserError

_SECONDS = 5.0  # maximum time that the server may take to answer


class Server:
    """A client of the server with OpenAI's API at `url`. Every method raises UserError if the server fails."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise UserError("server", url, "must begin with http:// or https://")

    def model(self) -> str:
        """Return the name of the model that it serves."""
        with self._ask("/v1/models") as response, self._understood():
            return str(json.load(response)["data"][0]["id"])

    def kind(self) -> str:
        """Return `twin` or `real`; empty for a server that is not ours."""
        with self._ask("/version") as response, self._understood():
            return str(json.load(response).get("engine", ""))

    def snapshot(self, seconds: float) -> Snapshot:
        """Return its metrics now, at `seconds` on the caller's clock."""
        with self._ask("/metrics") as response, self._understood():
            return Snapshot.from_families(seconds, text_string_to_metric_families(response.read().decode()))

    def answer(self, id: str, prompt: str, max_tokens: int) -> Iterator[str]:
        """Yield the text of an answer to `prompt`, piece by piece; `id` is its name on the server."""
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, "stream": True}
        headers = {"Content-Type": "application/json", "X-Request-Id": id, "X-Journey": "1"}
        with self._ask("/v1/chat/completions", json.dumps(body).encode(), headers, 600) as response, self._understood():
            for line in response:
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(b"data: {"):
                    document = json.loads(line[6:])
                    if "error" in document:
                        raise UserError("prompt", prompt, document["error"]["message"])
                    for choice in document["choices"]:
                        yield choice["delta"].get("content") or ""
            raise HTTPException

    def journey(self, id: str) -> dict[str, Any]:
        """Return the trace so far of the request with this `id` through the server; see `docs/serving-api.md`."""
        with self._ask(f"/journeys/{id}") as response, self._understood():
            answer: dict[str, Any] = json.load(response)
            return answer

    @contextmanager
    def _understood(self) -> Iterator[None]:
        try:
            yield
        except (OSError, HTTPException):
            raise UserError("server", self.url, "ended its answer too early; see what the server says") from None
        except (ValueError, LookupError, TypeError, AttributeError):
            raise UserError("server", self.url, "does not speak OpenAI's API; give another address") from None

    def _ask(
        self, path: str, body: bytes | None = None, headers: dict[str, str] | None = None, seconds: float = _SECONDS
    ) -> Any:
        try:
            return urlopen(Request(self.url + path, body, headers or {}), timeout=seconds)
        except HTTPError as error:
            raise UserError("server", self.url, f"{path} says {error.code}: {_said(error)}") from None
        except (OSError, HTTPException, ValueError) as error:
            why = getattr(error, "reason", error)
            raise UserError(
                "server", self.url, f"does not answer ({why}); start a server with tokentwin serve"
            ) from None


def _said(error: HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return error.reason
