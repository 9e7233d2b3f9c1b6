"""Checks of every request before the pages see it: the password, the host name, and the origin.

Host names are checked because of DNS rebinding: another site can let its own name point to this server, and then its
pages can read the answers. So a host name that is not served is refused. A numeric address is accepted, because it
belongs to no site. A browser states the site whose page makes a request (`Origin`). It must also be a name of this
server. This also prevents that Streamlit asks the internet for the address of this machine.
"""

from __future__ import annotations

import base64
import hmac
import re
import secrets
from collections.abc import Iterable
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from streamlit import file_util

_COOKIE = "tokentwin"
_HEALTH = "/_stcore/health"
_ASKS = {"www-authenticate": 'Basic realm="tokentwin", charset="UTF-8"'}


class Door:
    """ASGI middleware that checks every request.

    `names` are the host names that are served besides `localhost`. If there is a `password`, it must be given first.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str] = (), password: str = "") -> None:
        self._app = app
        self._names = {"localhost", *(name.lower() for name in names)}
        self._password = password
        self._token = secrets.token_urlsafe()  # cookie in place of the password: WebSockets send no password
        self._headers = _security_headers()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        response: Response | None = None
        asked = HTTPConnection(scope)
        known, gave = self._known(asked), False
        if refused := self._foreign(asked.headers):
            response = PlainTextResponse(f"{refused}\n", 403)
        elif scope["path"] != _HEALTH and not known:
            response = PlainTextResponse("a password is needed\n", 401, _ASKS)
        else:
            gave = known and "authorization" in asked.headers
        if response is None:
            await self._app(scope, receive, self._with_headers(send, gave))
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": refused[:100] or "a password is needed"})
        else:
            await response(scope, receive, self._with_headers(send, gave))

    def _foreign(self, headers: Headers) -> str:
        """Return the reason to refuse a request for another server; empty if it is for this one."""
        host = headers.get("host", "")
        name = _name(f"//{host}")
        if name not in self._names and not _is_address(name):
            return f"host: {name[:80]!r} is not a name of this server; start the dashboard with --served-as {name[:80]}"
        origin = headers.get("origin")
        if origin is not None and _site(origin) != host.lower():
            return f"origin: {origin[:80]!r} is another site than {host[:80]!r}; a proxy must pass on the Host header"
        return ""

    def _known(self, asked: HTTPConnection) -> bool:
        if not self._password:
            return True
        scheme, _, given = asked.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "basic":
            try:
                said = base64.b64decode(given, validate=True).partition(b":")[2]
            except ValueError:
                return False
            return hmac.compare_digest(said, self._password.encode())
        return hmac.compare_digest(asked.cookies.get(_COOKIE, "").encode(), self._token.encode())

    def _with_headers(self, send: Send, said_password: bool) -> Send:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                message.setdefault("headers", [])
                headers = MutableHeaders(scope=message)
                headers.update(self._headers)
                if self._password and said_password:
                    headers.append("set-cookie", f"{_COOKIE}={self._token}; Path=/; HttpOnly; SameSite=Strict")
            await send(message)

        return sent


def _security_headers() -> dict[str, str]:
    """Return headers that allow only scripts, connections and pictures of this server, and no frames on other sites.

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
    return {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "x-frame-options": "DENY",
        "x-content-type-options": "nosniff",
        "referrer-policy": "same-origin",
    }


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
