"""Access to the dashboard: who is let in, and under which name."""

import asyncio
import base64
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("streamlit")


import tokentwin.dashboard.server
from tokentwin.commands.dashboard import dashboard as command
from tokentwin.dashboard.door import Door

PAGES = Path(tokentwin.dashboard.__file__).parent


def asked(door, kind="http", path="/run", **headers):
    """Return what the door answers; if it lets the request in, that is 200 or an open WebSocket."""
    sent = []
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]

    async def send(message):
        sent.append(message)

    asyncio.run(door({"type": kind, "path": path, "headers": raw}, None, send))
    return sent[0]


async def pages(scope, receive, send):
    opened = (
        {"type": "websocket.accept"} if scope["type"] == "websocket" else {"type": "http.response.start", "status": 200}
    )
    await send(opened)


def let_in(answer):
    return answer.get("status") == 200 or answer["type"] == "websocket.accept"


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_a_name_that_is_not_served_is_refused(kind):
    door = Door(pages, names=["Box", "dash.example.org"])
    served = ("localhost:8501", "127.0.0.1:8501", "[::1]:8501", "10.0.0.7", "box:8501", "BOX", "dash.example.org")
    for host in served:
        assert let_in(asked(door, kind, host=host)), host
    for host in ("evil.example", "127.0.0.1.evil.example:8501", "localhost.evil", "", "[::1"):
        assert not let_in(asked(door, kind, host=host)), host
    assert not let_in(asked(door, kind))
    assert let_in(asked(door, kind, host="box:8501", origin="http://box:8501"))
    for origin in ("http://evil.example", "http://box:9000", "null", "http://[::1"):
        assert not let_in(asked(door, kind, host="box:8501", origin=origin)), origin


def test_a_password_is_asked_for_and_a_browser_that_gave_it_opens_a_websocket():
    door = Door(pages, password="blåbær")

    def basic(text):
        return f"Basic {base64.b64encode(text.encode()).decode()}"

    for said in (
        {},
        {"authorization": basic("me:wrong")},
        {"authorization": "Basic !"},
        {"cookie": "tokentwin=guess"},
        {"cookie": "tokentwin=\xe9"},
    ):
        answer = asked(door, host="localhost", **said)
        assert answer["status"] == 401 and b"www-authenticate" in dict(answer["headers"])
        assert not let_in(asked(door, "websocket", host="localhost", **said))
    answer = asked(door, host="localhost", authorization=basic("me:blåbær"))
    cookie = dict(answer["headers"])[b"set-cookie"].decode()
    assert let_in(answer) and "HttpOnly" in cookie and "SameSite=Strict" in cookie and "blåbær" not in cookie
    assert let_in(asked(door, "websocket", host="localhost", cookie=f"other=1; {cookie.partition(';')[0]}"))
    health = asked(door, path="/_stcore/health", host="localhost", authorization=basic("me:wrong"))
    assert let_in(health) and b"set-cookie" not in dict(health["headers"]), "what shows the password is for who gave it"


def test_no_page_of_another_site_can_hold_ours():
    headers = dict(asked(Door(pages), host="localhost")["headers"])
    assert headers[b"x-frame-options"] == b"DENY"
    policy = headers[b"content-security-policy"].decode()
    assert "frame-ancestors 'none'" in policy
    assert not {"'unsafe-inline'", "'unsafe-eval'", "*"} & set(re.search(r"script-src ([^;]+)", policy)[1].split())


@pytest.mark.parametrize(
    ("arguments", "warned"),
    [([], False), (["--host", "0.0.0.0"], True), (["--host", "0.0.0.0", "--password", "x"], False)],
)
def test_without_a_password_an_open_port_is_warned_of(arguments, warned, monkeypatch, tmp_path):
    served = []
    monkeypatch.setattr(tokentwin.dashboard.server, "serve", lambda *given: served.append(given))
    done = CliRunner().invoke(command, [str(tmp_path), "--port", "18511", *arguments])
    assert done.exit_code == 0 and len(served) == 1
    assert ("Give --password" in done.stderr) is warned
