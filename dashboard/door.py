"""What stands before the pages: who may ask, under which name, and what a browser may do with the answer.

DNS rebinding: a page of another site can have its own name point here, and then read what is served as its own. So a
name that is not served is refused; an address made of digits is nobody's name. A browser tells from whose page a
request comes (`Origin`); that must be one of ours, too, which also keeps Streamlit from asking the internet for the
address of this machine.
"""

from __future__ import annotations

import base64
import hmac
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from streamlit import file_util

from dashboard.plotly_bundle import lighter

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

_COOKIE = "tokentwin"
_HEALTH = "/_stcore/health"
_PLOTLY = re.compile(r"/static/js/PlotlyChart\.[\w-]+\.js$")
_FOREVER = (
    b"cache-control",
    b"public, immutable, max-age=31536000",
)  # its name has its hash in it, as Streamlit has it


class Door:
    """ASGI middleware.

    `names` are the host names that are served beside `localhost`; with a `password` it asks for that first.
    """

    def __init__(self, app: App, names: Iterable[str] = (), password: str = "") -> None:
        self._app = app
        self._names = {"localhost", *(name.lower() for name in names)}
        self._password = password
        self._token = secrets.token_urlsafe()  # what a browser shows instead of the password, which WebSockets cannot
        self._headers = _security_headers()
        self._plotly: dict[str, bytes] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        refused = self._foreign(headers)
        if refused:
            await _answer(scope, send, 403, refused)
        elif scope["path"] != _HEALTH and not self._known(headers):
            asks = [(b"www-authenticate", b'Basic realm="tokentwin", charset="UTF-8"')]
            await _answer(scope, send, 401, "a password is needed", asks)
        elif scope["type"] == "http" and _PLOTLY.search(scope["path"]):
            await self._send_plotly(scope, receive, send)
        else:
            await self._app(scope, receive, self._with_headers(send, "authorization" in headers))

    def _foreign(self, headers: dict[str, str]) -> str:
        """Why the request is not for this server; empty if it is."""
        host = headers.get("host", "")
        name = _name(f"//{host}")
        if name not in self._names and not _is_address(name):
            return f"host: {name[:80]!r} is not served here; start the dashboard with --served-as {name[:80]}"
        origin = headers.get("origin")
        if origin is not None and _site(origin) != host.lower():
            return f"origin: {origin[:80]!r} is another site than {host[:80]!r}; a proxy must pass on the Host header"
        return ""

    def _known(self, headers: dict[str, str]) -> bool:
        if not self._password:
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "basic":
            try:
                said = base64.b64decode(given, validate=True).partition(b":")[2]
            except ValueError:
                return False
            return hmac.compare_digest(said, self._password.encode())
        shown = re.search(rf"(?:^|;\s*){_COOKIE}=([A-Za-z0-9_-]+)", headers.get("cookie", ""))
        return shown is not None and hmac.compare_digest(shown[1], self._token)

    def _with_headers(self, send: Send, said_password: bool) -> Send:
        async def sent(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                more = list(self._headers)
                if self._password and said_password:
                    cookie = f"{_COOKIE}={self._token}; Path=/; HttpOnly; SameSite=Strict"
                    more.append((b"set-cookie", cookie.encode()))
                message["headers"] = [*message.get("headers", ()), *more]
            await send(message)

        return sent

    async def _send_plotly(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The module without what no page draws, and Streamlit's own answer where it has no such file."""
        path = scope["path"]
        if path not in self._plotly:
            file = Path(file_util.get_static_dir()) / path[path.index("/static/js/") + 1 :]
            if not file.is_file():
                await self._app(scope, receive, self._with_headers(send, False))
                return
            self._plotly[path] = lighter(file.read_text(encoding="utf-8")).encode()
        body = self._plotly[path]
        headers = [(b"content-type", b"text/javascript; charset=utf-8"), _FOREVER, *self._headers]
        await _respond(send, 200, body, headers)


def _security_headers() -> Headers:
    """Scripts, connections and pictures from this server alone, and no page of another site around ours.

    Streamlit and Plotly write styles into elements; Streamlit's one script in the page is allowed by its hash.
    """
    index = Path(file_util.get_static_dir()) / "index.html"
    inline = re.findall(r"<script>(.*?)</script>", index.read_text(encoding="utf-8"), re.DOTALL)
    hashes = [f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'" for text in inline]
    policy = {
        "default-src": "'self'",
        "script-src": " ".join(["'self'", *hashes]),
        "style-src": "'self' 'unsafe-inline'",
        "img-src": "'self' data: blob:",
        "font-src": "'self' data:",
        "worker-src": "'self' blob:",
        "object-src": "'none'",
        "base-uri": "'self'",
        "form-action": "'self'",
        "frame-ancestors": "'none'",
    }
    return [
        (b"content-security-policy", "; ".join(f"{name} {value}" for name, value in policy.items()).encode()),
        (b"x-frame-options", b"DENY"),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"same-origin"),
    ]


def _name(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _site(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


async def _answer(scope: Scope, send: Send, status: int, line: str, headers: Headers | None = None) -> None:
    """One line of text; a WebSocket is refused before it opens."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": line[:100]})
    else:
        await _respond(
            send, status, f"{line}\n".encode(), [(b"content-type", b"text/plain; charset=utf-8"), *(headers or [])]
        )


async def _respond(send: Send, status: int, body: bytes, headers: Headers) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})
