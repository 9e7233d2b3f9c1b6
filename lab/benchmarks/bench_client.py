r"""How far a TTFT that `bench --url` records lies from a server's known delay, and where the difference comes from.

    python -m lab.benchmarks.bench_client [--requests 400] [--rate 20] [--tokens 50] [--runs 3]

The server is a process of its own. It sends the first token of an answer after a delay between 20 and 200 ms, which
depends only on the request's number, and one more token every 20 ms. It notes when it has read a request and when it
writes the first token; client and server read the same clock. So the difference of each TTFT from the known delay
has four parts: the request was sent late, it took time to the server, the server wrote late, and the token took time
to the client. The server's lateness is no fault of the client. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter_ns
from typing import Any, cast

import numpy as np

from lab.benchmarks.front_door import cpu_s
from tokentwin.planning.bench.request import BenchTarget
from tokentwin.serving.workload import PRIVATE, Workload, WorkloadRequest
from tokentwin.tables import print_table
from tokentwin.traces.recording import Recording

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nTransfer-Encoding: chunked\r\n\r\n"
_MODELS = b'{"data": [{"id": "m"}]}'
_SPIN_S = 0.002
PARTS = ("late_sending", "to_server", "late_server", "to_client")


def delay_s(number: int) -> float:
    """Return the known delay of the first token of request `number`; -1 is a request before the measurement."""
    return 0.02 + (number * 0.0137) % 0.18


def chunk(data: bytes) -> bytes:
    """Return `data` as a chunk of HTTP."""
    return b"%x\r\n%s\r\n" % (len(data), data)


class Known(asyncio.Protocol):
    """A connection of the server. `seen` gets each request's number and the times of reading it and of its answer."""

    def __init__(self, seen: list[tuple[int, int, int]]) -> None:
        self._seen = seen
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        now_ns, self._data = perf_counter_ns(), self._data + data
        head, ended, body = self._data.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
        if ended and len(body) >= int(fields.get(b"content-length", b"0")):
            self._data = b""
            if head.startswith(b"GET"):
                known = head.startswith(b"GET /v1/models")
                self._transport.write(_HEAD % b"application/json" + chunk(_MODELS if known else b"{}") + chunk(b""))
            else:
                number = int(fields.get(b"x-request-id", b"-1").rpartition(b"-")[2] or -1)
                _WRITERS.add(asyncio.create_task(self._answer(number, json.loads(body)["max_tokens"], now_ns)))

    async def _answer(self, number: int, tokens: int, read_ns: int) -> None:
        due_ns = read_ns + round(delay_s(number) * 1e9)
        for token in range(tokens):
            while (left_s := (due_ns - perf_counter_ns()) / 1e9) > 0:
                await asyncio.sleep(left_s if token else max(left_s - _SPIN_S, 0))
            event = {"choices": [{"index": 0, "text": " a", "token_ids": [5], "finish_reason": None}]}
            data = chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
            if not token:
                data = _HEAD % b"text/event-stream" + data
                self._seen.append((number, read_ns, perf_counter_ns()))
            self._transport.write(data)
            due_ns += 20_000_000
        self._transport.write(chunk(b"data: [DONE]\n\n") + chunk(b""))


_WRITERS: set[asyncio.Task[None]] = set()


async def serve() -> None:
    """Serve until stdin is closed, and write what was seen to stdout; the first line is the port."""
    seen: list[tuple[int, int, int]] = []
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Known(seen), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    print(json.dumps(seen))


def measure(requests: int, rate: float, tokens: int, seed: int) -> dict[str, float]:
    """Send `requests` at `rate` a second to a new server; return the differences of TTFT and their parts in ms."""
    from tokentwin.planning.bench.client import bench

    arrivals = np.cumsum(np.random.default_rng(seed).exponential(1e9 / rate, requests)).astype(int)
    offered = [WorkloadRequest(at, int(ns), ((PRIVATE, 500),), tokens) for at, ns in enumerate(arrivals)]
    command = [sys.executable, "-m", "lab.benchmarks.bench_client", "--serve"]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server,
        tempfile.TemporaryDirectory() as folder,
    ):
        assert server.stdin is not None and server.stdout is not None
        url, own = f"http://127.0.0.1:{int(server.stdout.readline())}", cpu_s("self")
        bench(Workload(offered, "known delays"), BenchTarget(url=url), Path(folder) / "out")
        own = cpu_s("self") - own
        seen = {number: (read_ns, wrote_ns) for number, read_ns, wrote_ns in json.loads(server.communicate()[0])}
        recording = Recording.load(Path(folder) / "out")
        begin_ns = json.loads(recording.run["notes"])["client"]["origin_ns"]
        rows = recording.requests.to_pylist()
    assert [row["status"] for row in rows] == ["finished"] * requests
    parts = np.array([_parts(row, begin_ns, *seen[row["request_id"]]) for row in rows]) / 1e6
    columns = {"difference": parts.sum(1), "without_server": parts[:, [0, 1, 3]].sum(1)}
    columns |= {name: parts[:, at] for at, name in enumerate(PARTS)}
    figures = {f"{name}_p{q}": round(float(np.percentile(ms, q)), 2) for name, ms in columns.items() for q in (50, 99)}
    return {**figures, "cpu_s": round(own, 2)}


def _parts(row: dict[str, Any], begin_ns: int, read_ns: int, wrote_ns: int) -> tuple[float, ...]:
    """Return the four parts of the difference between a TTFT and the known delay, in ns."""
    number, sent_ns, came_ns = row["request_id"], row["send_ns"] + begin_ns, row["first_token_ns"] + begin_ns
    late_ns = wrote_ns - read_ns - delay_s(number) * 1e9
    return row["send_ns"] - row["arrival_ns"], read_ns - sent_ns, late_ns, came_ns - wrote_ns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second")
    parser.add_argument("--tokens", type=int, default=50, help="number of tokens of each answer")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--serve", action="store_true", help="be the server")
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve())
        return
    rows = [measure(args.requests, args.rate, args.tokens, seed) for seed in range(args.runs)]
    print_table(["ms", *(f"run {at}" for at in range(args.runs))], [[n, *(str(r[n]) for r in rows)] for n in rows[0]])
    print(json.dumps({"requests": args.requests, "rate": args.rate, "tokens": args.tokens, "measured": rows}))


if __name__ == "__main__":
    main()
