"""An HTTP/1.1 response, parsed as its bytes come (RFC 9112), so that each piece of its body keeps its time."""

from __future__ import annotations

from collections.abc import Callable

_MOST_HEAD = 1 << 16  # also of a line of a chunked body
_MOST_BODY = 1 << 20  # of a bad response
_CODINGS = {"transfer-encoding": ("identity", "chunked"), "content-encoding": ("identity",)}


class HttpResponse:
    """A response that is being received. `take` gets each piece of the body of a good one, and when it came, in ns.

    Attributes:
        status: HTTP status; 0 until the head has come
        body: the body of a response that is not good
        reusable: True after the response if its connection can have another request
    """

    def __init__(self, take: Callable[[bytes, int], None]) -> None:
        self.status = 0
        self.body = b""
        self.reusable = False
        self._take = take
        self._rest = b""
        self._left: int | None = 0  # bytes left of the body or of a chunk; None: all until the connection ends
        self._chunked = False
        self._keeps_open = False
        self._line = "size"  # meaning of the next line of a chunked body: the end of a chunk, a size, or a trailer

    @property
    def ok(self) -> bool:
        """True if the server has accepted the request."""
        return 200 <= self.status < 300

    def push(self, data: bytes | None, now_ns: int) -> bool:
        """Take data that came at `now_ns`, or None for the end of the connection; return whether the response ended.

        Raises OSError if the connection has ended too early, and ValueError for data that is no HTTP.
        """
        if data is None:
            if self.status and self._left is None:
                return True
            raise ConnectionError("the server closed the connection")
        self._rest += data
        while not self.status:
            head, ended, rest = self._rest.partition(b"\r\n\r\n")
            if not ended:
                if len(head) > _MOST_HEAD:
                    raise ValueError("the head of the response is too long")
                return False
            self._rest = rest
            self._read_head(head.decode("latin-1"))
        ended_here = self._read_chunks(now_ns) if self._chunked else self._read_plain(now_ns)
        self.reusable = ended_here and self._keeps_open and not self._rest
        return ended_here

    def _read_head(self, head: str) -> None:
        first, *lines = head.split("\r\n")
        version, _, status = first.partition(" ")
        if not version.startswith("HTTP/1.") or not status[:3].isdigit():
            raise ValueError(f"no HTTP response: {first[:80]}")
        pairs = (line.partition(":") for line in lines)
        fields = {name.strip().lower(): value.strip().lower() for name, _, value in pairs}
        code = int(status[:3])
        if code < 200:  # such as 100 Continue; another head follows
            return
        self.status = code
        for name, known in _CODINGS.items():
            if fields.get(name, "identity") not in known:
                raise ValueError(f"{name} {fields[name][:80]}")
        self._chunked = fields.get("transfer-encoding") == "chunked"
        length = fields.get("content-length")
        if self._chunked or code in (204, 304):
            self._left = 0
        elif length is None:
            self._left = None
        else:
            self._left = _number(length, 10)
        closes = "close" in fields.get("connection", "")
        self._keeps_open = version == "HTTP/1.1" and not closes and self._left is not None

    def _read_plain(self, now_ns: int) -> bool:
        self._give(now_ns)
        return self._left == 0

    def _read_chunks(self, now_ns: int) -> bool:
        while True:
            if self._left:
                self._give(now_ns)
                if self._left:
                    return False
                self._line = "end"
            line, ended, rest = self._rest.partition(b"\r\n")
            if not ended:
                if len(line) > _MOST_HEAD:
                    raise ValueError("a line of the chunked body is too long")
                return False
            self._rest = rest
            if self._line == "size":
                self._left = _number(line.partition(b";")[0].decode("latin-1").strip(), 16)
                self._line = "end" if self._left else "trailer"
            elif self._line == "end":
                if line:
                    raise ValueError("a chunk is longer than its size")
                self._line = "size"
            elif not line:
                return True

    def _give(self, now_ns: int) -> None:
        piece = self._rest if self._left is None else self._rest[: self._left]
        self._rest = self._rest[len(piece) :]
        if self._left is not None:
            self._left -= len(piece)
        if not piece:
            return
        if self.ok:
            self._take(piece, now_ns)
        else:
            self.body = (self.body + piece)[:_MOST_BODY]


def _number(digits: str, base: int) -> int:
    """Return a length in bytes. Raises ValueError if it has a sign or anything else but digits."""
    if not digits.isalnum():
        raise ValueError(f"a length of {digits[:80]!r}")
    return int(digits, base)
