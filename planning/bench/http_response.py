"""An HTTP/1.1 response, parsed by h11 as its bytes come, so that each piece of its body keeps its time."""

from __future__ import annotations

from collections.abc import Callable

import h11

_MOST_HEAD = 1 << 16  # also of a line of a chunked body
_MOST_BODY = 1 << 20  # of a bad response
_ASKED = h11.Request(method="POST", target="/", headers=[("Host", "-"), ("Content-Length", "0")])


class HttpResponse:
    """A response that is being received. `take` gets each piece of the body of a good one, and when it came, in ns.

    Attributes:
        status: HTTP status; 0 until the head has come
        body: the body of a response that is not good
    """

    def __init__(self, take: Callable[[bytes, int], None]) -> None:
        self.status = 0
        self.body = b""
        self._take = take
        self._parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MOST_HEAD)
        self._parser.send(_ASKED)
        self._parser.send(h11.EndOfMessage())

    @property
    def ok(self) -> bool:
        """True if the server has accepted the request."""
        return 200 <= self.status < 300

    @property
    def reusable(self) -> bool:
        """True after the response if its connection can have another request."""
        return self._parser.their_state is h11.DONE and self._parser.trailing_data == (b"", False)

    def push(self, data: bytes | None, now_ns: int) -> bool:
        """Take data that came at `now_ns`, or None for the end of the connection; return whether the response ended.

        Raises OSError if the connection has ended too early, and ValueError for data that is no HTTP.
        """
        self._parser.receive_data(data or b"")
        try:
            while (event := self._parser.next_event()) is not h11.NEED_DATA:
                if isinstance(event, h11.Response):
                    self._begin(event)
                elif isinstance(event, h11.Data):
                    self._give(bytes(event.data), now_ns)
                elif isinstance(event, h11.EndOfMessage):
                    return True
        except h11.RemoteProtocolError as error:
            if data is None:
                raise ConnectionError("the server closed the connection") from None
            raise ValueError(f"no HTTP response: {error}") from None
        return False

    def _begin(self, response: h11.Response) -> None:
        self.status = response.status_code
        if sum(len(name) + len(value) for name, value in response.headers) > _MOST_HEAD:
            raise ValueError("the head of the response is too long")
        for name, value in response.headers:
            if name == b"content-encoding" and value.lower() != b"identity" and self.ok:
                raise ValueError(f"content-encoding {value[:80].decode('latin-1')}")

    def _give(self, piece: bytes, now_ns: int) -> None:
        if self.ok:
            self._take(piece, now_ns)
        else:
            self.body = (self.body + piece)[:_MOST_BODY]
