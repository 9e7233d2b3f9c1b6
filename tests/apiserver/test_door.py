"""Who may ask for what, checked before a body is read: keys, names of the host, pages of other origins, operators."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.apiserver.served import TWIN, Server, serving
from tests.apiserver.test_work import api_s

ORDERS = [("POST", "/sleep?level=0"), ("POST", "/wake_up"), ("PUT", "/admin/failures"), ("PUT", "/admin/metrics")]
COMPLETE = "/v1/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve as the container does: without a key, to every network."""
    with serving(tmp_path_factory.mktemp("twin"), *TWIN, "--host", "0.0.0.0", "--enable-sleep-mode") as server:
        yield server


def own_address() -> str:
    """Return an address of this machine that is not loopback; skip if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no network")
        return str(probe.getsockname()[0])


@pytest.mark.parametrize(("method", "path"), ORDERS)
def test_orders_need_a_key_or_this_machine_and_no_page_gives_them(server: Server, method: str, path: str) -> None:
    body = None if method == "POST" else {}
    port = server.address[1]
    for headers in (
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": f"http://127.0.0.1.evil.example:{port}"},
        {"X_Forwarded_For": "203.0.113.9"},
    ):
        assert server.ask(method, path, body, **headers).status == 403, headers
    rebound = f"evil.example:{port}"
    assert server.ask(method, path, body, Host=rebound, Origin=f"http://{rebound}").status == 400
    for local in ("localhost", "127.0.0.1", "[::1]"):
        assert server.ask(method, path, body, Host=local, Origin=f"http://{local}").status == 200
    assert server.ask(method, path, body, Origin=f"http://{server.address[0]}:{port}").status == 200
    assert server.ask(method, path, body).status == 200
    for order, at, status in ((method, path, 403), ("GET", "/v1/models", 200)):
        connection = HTTPConnection(own_address(), port, timeout=60)
        connection.request(order, at, b"{}" if order == "PUT" else None, {"Content-Type": "application/json"})
        assert connection.getresponse().status == status
        connection.close()


def test_with_names_no_page_of_another_sends_anything(tmp_path: Path) -> None:
    options = ("--allowed-hosts", "127.0.0.1,chat.example", "--enable-sleep-mode")
    with serving(tmp_path, *TWIN, *options) as server:
        for method, path in (*ORDERS, ("POST", COMPLETE)):
            body = {"prompt": "a", "max_tokens": 1} if path == COMPLETE else {} if method == "PUT" else None
            assert server.ask(method, path, body, Origin="http://evil.example").status == 403
            assert server.ask(method, path, body, Origin="https://chat.example").status == 200


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("keyed")
    (folder / "keys").write_text("one")
    with serving(folder, *TWIN, "--api-key-file", folder / "keys") as server:
        yield server


@pytest.mark.parametrize("pack", [zlib.compress, lambda data: zlib.compress(data, wbits=31)], ids=["deflate", "gzip"])
def test_a_compressed_body_is_refused_and_never_unpacked(keyed: Server, pack: Callable[[bytes], bytes]) -> None:
    bomb = pack(bytes(200_000_000))
    coding = "gzip" if bomb.startswith(b"\x1f\x8b") else "deflate"
    began_s = api_s(keyed)
    for _ in range(5):
        assert keyed.ask("POST", COMPLETE, bomb, Content_Encoding=coding).status == 401
        refused = keyed.ask("POST", COMPLETE, bomb, Content_Encoding=coding, Authorization="Bearer one")
        assert refused.status == 415 and "Content-Encoding" in refused.error["message"]
    assert keyed.ask("POST", "/invocations", bomb, Content_Encoding=coding, Authorization="Bearer one").status == 415
    assert api_s(keyed) - began_s < 0.5, "ten of them take a second and more to unpack"


def test_a_body_is_asked_for_only_with_a_key(keyed: Server) -> None:
    def first_line(*headers: str) -> bytes:
        lines = (f"POST {COMPLETE} HTTP/1.1", "Host: a", "Content-Type: application/json", *headers)
        with socket.create_connection(keyed.address, timeout=30) as connection:
            connection.sendall("\r\n".join([*lines, "Content-Length: 9", "Expect: 100-continue", "", ""]).encode())
            return connection.recv(12)

    assert first_line() == b"HTTP/1.1 401"
    assert first_line("Authorization: Bearer one") == b"HTTP/1.1 100"
