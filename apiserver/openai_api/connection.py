"""HTTP connections, which answer invalid HTTP with OpenAI's error document and drop clients that are too slow."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from aiohttp import web

from tokentwin.apiserver.openai_api.refusal import Refusal, answer_to

_REST_S = 2.0  # time to read the rest of a request after its answer, so that the client sees the answer


class Connection(web.RequestHandler):
    """A connection; its client has `patience_s` to send the head of a request, and to read what was written."""

    def __init__(self, server: web.Server, patience_s: float) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # None: no access log
            keepalive_timeout=patience_s,  # maximum time from the last answer, or from the start, to a complete head
            lingering_time=_REST_S,
            auto_decompress=False,  # a kilobyte can become a megabyte
        )
        self._patience_s = patience_s
        self._drops: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """Start a timer for a client that does not read as fast as the server writes."""
        super().pause_writing()
        assert self.transport is not None
        self._drops = self._loop.call_later(self._patience_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._keep()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Stop the timer of a connection that has ended."""
        self._keep()
        super().connection_lost(exc)

    def _keep(self) -> None:
        if self._drops is not None:
            self._drops.cancel()
            self._drops = None

    def log_exception(self, *args: Any, **more: Any) -> None:
        """Log nothing, because errors of clients are not logged, and handlers log errors of the server."""

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer a request that cannot be parsed, which never reaches a handler."""
        if request.writer.output_size > 0:
            raise ConnectionError("part of an answer is with the client")
        response = answer_to(Refusal(status, "this is not a request of HTTP, or its head is too long"))
        response.force_close()
        return response


async def expect(request: web.Request) -> None:
    """Ask for no body yet: `Bodies` does, after the request's key was checked."""


async def listen(server: web.Server, patience_s: float, **where: Any) -> asyncio.Server:
    """Let `server` listen on a socket; `where` are arguments of asyncio's `create_server`."""
    loop = asyncio.get_running_loop()
    return await loop.create_server(partial(Connection, server, patience_s), backlog=1024, **where)
