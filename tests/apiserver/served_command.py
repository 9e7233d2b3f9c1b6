"""`tokentwin serve`, run as a user runs it."""

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq


@contextmanager
def served(*options: str) -> Iterator[list[str]]:
    """Run a server for the `with` block, and return the URLs at which it answers."""
    command = [sys.executable, "-m", "tokentwin.cli", "serve", "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        urls = re.findall(r"(http://\S+)/v1", line)
        assert urls, process.stderr.read()
        yield urls
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=30)
        finally:
            process.kill()


def kv_batches(port: int, number: int = 0) -> list[tuple[str, int, list[dict[str, Any]]]]:
    """Return topics, sequence numbers and events of what was published since `number`, from a replay endpoint."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.connect(f"tcp://127.0.0.1:{port}")
        asking.send_multipart([b"", number.to_bytes(8, "big")])
        batches: list[tuple[str, int, list[dict[str, Any]]]] = []
        while True:
            assert asking.poll(30_000)
            _, topic, sequence, batch = asking.recv_multipart()
            if int.from_bytes(sequence, "big", signed=True) == -1:
                return batches
            batches.append((topic.decode(), int.from_bytes(sequence, "big"), msgspec.msgpack.decode(batch)[1]))


def free_ports(count: int) -> int:
    """Return the first of several ports in a row that nobody listens on."""
    while True:
        taken = [socket.socket() for _ in range(count)]
        try:
            taken[0].bind(("127.0.0.1", 0))
            first: int = taken[0].getsockname()[1]
            for at, one in enumerate(taken[1:], 1):
                one.bind(("127.0.0.1", first + at))
            return first
        except OSError:
            continue
        finally:
            for one in taken:
                one.close()
