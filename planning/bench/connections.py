"""HTTP connections of a client that measures: requests leave at once, and bytes get the time of the read from a socket.

A connection is made ahead of its request, so that no request waits for a handshake. What all ready sockets hold is
read, and gets its time, before any of it is parsed; parsing takes turns with reading.
"""

from __future__ import annotations

import asyncio
import ssl
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Mapping
from time import perf_counter_ns
from typing import cast
from urllib.parse import quote, unquote, urlsplit

from tokentwin.planning.bench.http_response import HttpResponse
from tokentwin.serving.version import __version__

_PARSE_NS = 500_000  # after this time of parsing, sockets are read again
_IDLE_NS = 2_000_000_000  # an idle connection is closed after this time, before the server closes it


class Connections:
    """The connections to the server at `url`; every request has `headers`."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        self._address = str(parts.hostname), parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        user, _, host = parts.netloc.rpartition("@")
        fixed = {
            "Host": host,
            "User-Agent": f"tokentwin/{__version__}",
            "Content-Type": "application/json",
            "Accept": "*/*",
            "Accept-Encoding": "identity",
            **headers,
        }
        if user:
            fixed.setdefault("Authorization", f"Basic {b64encode(unquote(user).encode()).decode()}")
        path = quote(parts.path, safe="/%:@!$&'()*+,;=~")
        lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fixed.items())]
        self._head = "".join(f"{line}\r\n" for line in lines)
        self._idle: deque[tuple[int, _Connection]] = deque()  # the longest idle first
        self._making: asyncio.Task[None] | None = None
        self._inbox = _Inbox()

    def request(self, body: bytes, id: str) -> bytes:
        """Return a request with its head; `id` is its `X-Request-Id`."""
        return f"{self._head}X-Request-Id: {id}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body

    def prepare(self) -> None:
        """Close connections that are idle for long, and begin to make one if none is left."""
        oldest_ns = perf_counter_ns() - _IDLE_NS
        while self._idle and (self._idle[0][0] < oldest_ns or not self._idle[0][1].is_open):
            self._idle.popleft()[1].close()
        if not self._idle and self._making is None:
            self._making = asyncio.create_task(self._make_ahead())

    async def _make_ahead(self) -> None:
        try:
            connection = await self.make()
            self._idle.append((perf_counter_ns(), connection))
        except OSError:
            pass  # the next request tries again, and reports the error
        finally:
            self._making = None

    async def make(self) -> _Connection:
        """Make a connection. Raises OSError if that fails."""
        made = asyncio.get_running_loop().create_connection(
            lambda: _Connection(self._inbox), *self._address, ssl=self._tls
        )
        return (await made)[1]

    def send(self, request: bytes, take: Callable[[bytes, int], None]) -> Exchange:
        """Send a request now, if a connection is idle, else when one is made; `take` gets the body of a good answer."""
        exchange = Exchange(self, request, take)
        while self._idle:
            _, connection = self._idle.pop()
            if connection.is_open:
                exchange.begin(connection)
                break
        return exchange

    def release(self, connection: _Connection, reusable: bool) -> None:
        """Keep the connection of an exchange that has ended for another request, or close it."""
        connection.exchange = None
        if reusable and connection.is_open:
            self._idle.append((perf_counter_ns(), connection))
        else:
            connection.close()

    def close(self) -> None:
        """Close all idle connections."""
        if self._making is not None:
            self._making.cancel()
        for _, connection in self._idle:
            connection.close()


class Exchange:
    """A request and its response."""

    def __init__(self, owner: Connections, request: bytes, take: Callable[[bytes, int], None]) -> None:
        self._owner = owner
        self._request = request
        self._take = take
        self._connection: _Connection | None = None
        self._answered = False  # True after the first byte of the response
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def begin(self, connection: _Connection) -> None:
        """Send the request."""
        self._connection = connection
        connection.exchange = self
        connection.write(self._request)
        self._response = HttpResponse(self._take)

    async def end(self) -> HttpResponse:
        """Wait for the end of the response.

        A server may close an idle connection just when a request leaves: the request is then sent again, once, on a
        new one. Raises OSError if no connection can be made or it breaks, and ValueError for bad content.
        """
        if (idle := self._connection) is not None:
            try:
                await self._ended
                return self._response
            except ConnectionError:
                if self._answered:
                    raise
                self._owner.release(idle, reusable=False)
                self._ended = asyncio.get_running_loop().create_future()
        self.begin(await self._owner.make())
        await self._ended
        return self._response

    def close(self) -> None:
        """Give the connection back; if the response has not ended, this breaks the connection."""
        if self._connection is not None:
            self._owner.release(self._connection, self._response.reusable)

    def push(self, data: bytes | None, now_ns: int) -> None:
        """Take data that came at `now_ns`; None is the end of the connection."""
        if self._ended.done():
            return
        self._answered = self._answered or data is not None
        try:
            ended = self._response.push(data, now_ns)
        except RecursionError:
            self._ended.set_exception(ValueError("an event is nested too deeply"))
            return
        except Exception as error:  # whatever it is, other requests go on
            self._ended.set_exception(error)
            return
        if ended:
            self._ended.set_result(None)


class _Inbox:
    """The data that was read from sockets, and is still to be parsed."""

    def __init__(self) -> None:
        self._came: deque[tuple[int, _Connection, bytes | None]] = deque()

    def put(self, connection: _Connection, data: bytes | None) -> None:
        if not self._came:
            asyncio.get_running_loop().call_soon(self._parse)
        self._came.append((perf_counter_ns(), connection, data))

    def _parse(self) -> None:
        until_ns = perf_counter_ns() + _PARSE_NS
        while self._came:
            now_ns, connection, data = self._came[0]
            if perf_counter_ns() > until_ns:
                asyncio.get_running_loop().call_soon(self._parse)
                return
            if connection.exchange is not None:
                connection.exchange.push(data, now_ns)
            self._came.popleft()


class _Connection(asyncio.Protocol):
    exchange: Exchange | None = None
    is_open = False

    def __init__(self, inbox: _Inbox) -> None:
        self._inbox = inbox

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True
        self.write, self.close = self._transport.write, self._transport.abort

    def data_received(self, data: bytes) -> None:
        self._inbox.put(self, data)
        self.is_open = self.is_open and self.exchange is not None  # bytes that nobody asked for

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._inbox.put(self, None)
