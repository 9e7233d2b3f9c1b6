"""One connection of HTTP: what is no HTTP is refused in OpenAI's words, and clients that neither send nor read go."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from aiohttp import web

from apiserver.refusal import Refusal, answer_to

_REST_S = 2.0  # how long what a client still sends after its answer is read, so that it gets to see that


class Connection(web.RequestHandler):
    """`patience_s` is how long a client may take over the head of a request, and over reading what was written."""

    def __init__(self, server: web.Server, patience_s: float) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # which keeps none
            keepalive_timeout=patience_s,  # from the last answer, or the connection's start, to a whole head
            lingering_time=_REST_S,
        )
        self._patience_s = patience_s
        self._drops: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """The client does not read as fast as is written."""
        super().pause_writing()
        assert self.transport is not None
        self._drops = self._loop.call_later(self._patience_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._keep()

    def connection_lost(self, exc: BaseException | None) -> None:
        """It is gone, and what it waited for with it."""
        self._keep()
        super().connection_lost(exc)

    def _keep(self) -> None:
        if self._drops is not None:
            self._drops.cancel()
            self._drops = None

    def log_exception(self, *args: Any, **more: Any) -> None:
        """What clients do wrong is no exception; what goes wrong here is logged where requests are handled."""

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """What cannot be parsed never gets to a handler."""
        if request.writer.output_size > 0:
            raise ConnectionError("part of an answer is with the client")
        response = answer_to(Refusal(status, "this is not a request of HTTP, or its head is too long"))
        response.force_close()
        return response


async def expect(request: web.Request) -> None:
    """For a header `Expect`: the body may come. What else it may ask for is not known to HTTP."""
    if request.headers["Expect"].lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")


async def listen(server: web.Server, patience_s: float, **where: Any) -> asyncio.Server:
    """Let `server` answer at a socket; `where` is as for `asyncio`'s `create_server`."""
    loop = asyncio.get_running_loop()
    return await loop.create_server(partial(Connection, server, patience_s), backlog=1024, **where)
