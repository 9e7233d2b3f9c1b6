"""A server in separate processes, and clients of it that use only the standard library."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any

TWIN = ("--twin", "--gpu", "H100", "--model", "Llama-3.1-8B")


class Server:
    """A running `tokentwin serve` on its own port; `said` is what it has written to stderr so far."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: Path) -> None:
        self.process = process
        self.url = url
        self._log = log
        address = re.fullmatch(r"https?://(.*):(\d+)/v1", url)
        assert address is not None
        self.address = address[1], int(address[2])
        self.tls: ssl.SSLContext | None = None

    @property
    def said(self) -> str:
        return self._log.read_text()

    def processes(self) -> dict[str, list[int]]:
        """Return the process ids of its processes by kind, `api` and `engine`; valid while none of them has died."""
        listed = subprocess.run(["ps", "-ww", "-o", "pid=,args=", "--ppid", str(self.process.pid)], capture_output=True)
        kinds: dict[str, list[int]] = {"engine": [], "api": []}
        for line in listed.stdout.decode().splitlines():
            pid, args = line.split(None, 1)
            if "spawn_main" in args:
                # The engine is started first, so that it has the lower number.
                kinds["api" if kinds["engine"] else "engine"].append(int(pid))
        return kinds

    def connect(self) -> HTTPConnection:
        if self.tls is not None:
            return HTTPSConnection(*self.address, context=self.tls, timeout=60)
        return HTTPConnection(*self.address, timeout=60)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answered:
        """Send one request on a new connection; `body` is bytes, or an object that is sent as JSON."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection = self.connect()
        try:
            json_sent = {} if data is None else {"Content-Type": "application/json"}
            given = {name.replace("_", "-"): text for name, text in headers.items()}
            connection.request(method, path, data, {**json_sent, **given})
            return Answered(connection.getresponse())
        finally:
            connection.close()

    def complete(self, **body: Any) -> Answered:
        return self.ask("POST", "/v1/completions", {"prompt": "Hello", "max_tokens": 4, **body})

    def chat(self, **body: Any) -> Answered:
        messages = [{"role": "user", "content": "Hello"}]
        return self.ask("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 4, **body})

    def raw(self, data: bytes, *, ends: bool = False) -> bytes:
        """Send these bytes, and return all that comes back until the server closes or stays silent."""
        with socket.create_connection(self.address, timeout=30) as connection:
            with suppress(ConnectionError):  # the server may have stopped reading
                connection.sendall(data)
            if ends:
                connection.shutdown(socket.SHUT_WR)
            answer = b""
            with suppress(ConnectionError):
                while piece := connection.recv(65536):
                    answer += piece
                    head, _, body = answer.partition(b"\r\n\r\n")
                    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
                    if length and len(body) >= int(length[1]):
                        break
            return answer


class Answered:
    """A complete answer."""

    def __init__(self, response: HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.body = response.read()

    @property
    def document(self) -> Any:
        return json.loads(self.body)

    @property
    def choice(self) -> Any:
        assert self.status == 200, self.body
        (choice,) = self.document["choices"]
        return choice

    @property
    def events(self) -> list[Any]:
        """The events of a stream, which must have ended as it should."""
        assert self.status == 200, self.body
        *events, done, nothing = self.body.decode().split("\n\n")
        assert (done, nothing) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    @property
    def error(self) -> Any:
        """The error of a refused request, which must be OpenAI's error document and nothing else."""
        assert 400 <= self.status < 600 and set(self.document) == {"error"}, self.body
        error = self.document["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["code"] == self.status
        assert isinstance(error["message"], str) and error["message"] and b"Traceback" not in self.body
        return error


@contextmanager
def serving(folder: Path, *options: object, ends: int = 0) -> Iterator[Server]:
    """Run a server until the context is left. It is then asked to end, if it has not, and must exit as expected."""
    log = folder / "stderr.txt"
    command = [sys.executable, "-m", "tokentwin", "serve", "--port", "0", *map(str, options)]
    with log.open("w") as err:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True, env=os.environ)
    assert process.stdout is not None
    try:
        url = re.search(r"answers at (\S+);", process.stdout.readline())
        assert url is not None, log.read_text()
        yield Server(process, url[1], log)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == ends, log.read_text()
    finally:
        if process.poll() is None:
            process.terminate()
            process.terminate()
            process.wait(60)
        process.stdout.close()
