r"""The cost of the API server (front door): CPU time per request and per token, lateness of tokens, and memory.

    python -m lab.benchmarks.front_door [--streams 1,64,512,1000] [--tokens 200] [--rate 20] [--api-workers 1] \
        [--alone 100]

The server simulates a fleet whose replicas give every stream `--rate` tokens a second, and serves `--streams` clients
at once. The lateness of a token is the time from the end of its step to its arrival at the client, which runs on the
same machine. Every answer is compared with the expected one: no token may be missing, or come twice. Tokens per second
count only the time in which all streams were under way. First, `--alone` requests are sent one after the other to a
fleet that is simulated in real time. Their overhead is the client's wait for its first token, less the simulated wait.
CPU time counts the server's processes alone, so other load on the machine hardly changes it. Other load distorts the
other figures, which are wall times. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from functools import partial
from pathlib import Path
from time import monotonic_ns
from typing import Any, cast

import numpy as np

from tests.apiserver.served import Server, serving
from tokentwin.planning.deployments import served
from tokentwin.planning.priced_scenario import price_scenario, with_fleet
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.tables import print_table
from tokentwin.traces.recording import Recording

REPLICAS = 4
GPU, MODEL, MAX_NUM_SEQS = "H100", "Llama-3.1-8B", 256
FLEET = ("--twin", "--gpu", GPU, "--model", MODEL, "--replicas", REPLICAS, "--max-num-seqs", MAX_NUM_SEQS)
PROMPT = "Hello there"
REQUESTS = 400  # number of one-token requests from which the cost of a request is measured
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Stream(asyncio.Protocol):
    """A client that notes when each piece of its answer came, and reads the pieces afterwards."""

    def __init__(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        self._request = head + b"Content-Length: %d\r\n\r\n%s" % (len(data), data)
        self.pieces: list[tuple[int, bytes]] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.asked_ns = monotonic_ns()
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((monotonic_ns(), data))
        if data.endswith(b"0\r\n\r\n"):
            self.transport.close()
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the server has hung up"))

    def words(self) -> tuple[list[str], list[int]]:
        """Return every token's word and arrival time; an event arrives with its last byte."""
        words: list[str] = []
        times: list[int] = []
        rest = b""
        for came_ns, data in self.pieces:
            *events, rest = (rest + data).split(b"\n\n")
            for event in events:
                _, begun, document = event.partition(b"data: {")
                if begun:
                    text = json.loads(b"{" + document)["choices"][0]["text"]
                    new = text.split()
                    words += new
                    times += [came_ns] * len(new)
        return words, times


async def stream_all(server: Server, bodies: list[dict[str, Any]]) -> list[Stream]:
    """Stream all requests at once, until every answer has ended."""
    loop = asyncio.get_running_loop()
    made = [await loop.create_connection(partial(Stream, body), *server.address) for body in bodies]
    streams = [stream for _, stream in made]
    await asyncio.gather(*[stream.done for stream in streams])
    return streams


async def stream_one_by_one(server: Server, bodies: list[dict[str, Any]]) -> list[Stream]:
    """Stream each request when the one before has ended."""
    return [stream for body in bodies for stream in await stream_all(server, [body])]


def token_s(streams: int, tokens: int) -> float:
    """Return the mean simulated seconds from one token of a stream to the next, with `streams` streams at once."""
    deployment = served().model_copy(update={"model": MODEL})
    scheduler = deployment.scheduler.model_copy(update={"max_num_seqs": MAX_NUM_SEQS})
    deployment = with_fleet(deployment.model_copy(update={"scheduler": scheduler}), REPLICAS, None)
    workload = Workload(tuple(WorkloadRequest(id, 0, (("", 2),), tokens) for id in range(streams)))
    rows = price_scenario(workload, None, GPU, deployment).requests().to_pylist()
    return float(np.mean([(row["finish_ns"] - row["first_token_ns"]) / 1e9 / max(tokens - 1, 1) for row in rows]))


def cpu_s(pid: int | str) -> float:
    """Return the CPU seconds that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def resident_mb(pid: int) -> float:
    """Return the resident memory of a process in MB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def spent(
    server: Server, pids: dict[str, list[int]], bodies: list[dict[str, Any]]
) -> tuple[list[Stream], dict[str, float]]:
    """Stream the requests in `bodies`; return the streams, and the CPU seconds by kind of process."""
    before = {kind: sum(map(cpu_s, processes)) for kind, processes in pids.items()}
    streams = asyncio.run(stream_all(server, bodies))
    return streams, {kind: sum(map(cpu_s, processes)) - before[kind] for kind, processes in pids.items()}


def measure(count: int, tokens: int, rate: float, workers: int) -> dict[str, Any]:
    """Measure one server with `count` clients at once."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        speed = token_s(count, tokens) * rate
        options = ("--speed", speed, "--api-workers", workers, "-o", out)
        with serving(Path(folder), *FLEET, *options) as server:
            asked = {"prompt": PROMPT, "ignore_eos": True, "stream": True}
            expected = server.complete(**{**asked, "stream": False}, max_tokens=tokens, seed=1).choice["text"].split()
            pids = server.processes()
            _, short = spent(server, pids, [{**asked, "max_tokens": 1} for _ in range(REQUESTS)])
            bodies = [{**asked, "max_tokens": tokens, "seed": 1} for _ in range(count)]
            streams, long = spent(server, pids, bodies)
            memory = {kind: sum(map(resident_mb, processes)) for kind, processes in pids.items()}
        rows = Recording.load(out).requests.sort_by("request_id").to_pylist()[-count:]
    read = [stream.words() for stream in streams]
    wrong = sum(words != expected for words, _ in read)
    return {
        "streams": count,
        **{f"{kind}_us_per_request": round(seconds / REQUESTS * 1e6) for kind, seconds in short.items()},
        **{f"{kind}_us_per_token": round(seconds / count / tokens * 1e6, 1) for kind, seconds in long.items()},
        **{f"{kind}_mb": round(size) for kind, size in memory.items()},
        **lateness(rows, [times for _, times in read], speed),
        "wrong": wrong,
    }


def lateness(rows: list[dict[str, Any]], came_ns: list[list[int]], speed: float) -> dict[str, float]:
    """Return the lateness of tokens in ms, and tokens per second.

    All streams are equal, so the n-th stream to arrive is assumed to be the n-th stream that was sent. The run's start
    is the latest time at which no stream arrives before it was sent.
    """
    rows = sorted(rows, key=lambda row: row["first_sent_ns"])
    came_ns = sorted(came_ns, key=lambda times: times[0])
    origin_ns = min(times[0] - row["first_sent_ns"] / speed for row, times in zip(rows, came_ns, strict=True))
    late = np.concatenate(
        [
            np.array(times) - origin_ns - np.array(row["token_times_ns"]) / speed
            for row, times in zip(rows, came_ns, strict=True)
        ]
    )
    begun_ns, ended_ns = max(times[0] for times in came_ns), min(times[-1] for times in came_ns)
    meanwhile = sum(begun_ns < at_ns <= ended_ns for times in came_ns for at_ns in times)
    p50, p99 = np.percentile(late, [50, 99]) / 1e6
    return {
        "late_p50_ms": round(float(p50), 2),
        "late_p99_ms": round(float(p99), 2),
        "tokens_per_s": round(meanwhile / max(ended_ns - begun_ns, 1) * 1e9),
    }


def overhead(requests: int, workers: int) -> dict[str, float]:
    """Return how many ms longer than the simulated TTFT a client waits, for requests sent one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        with serving(Path(folder), *FLEET, "--api-workers", workers, "-o", out) as server:
            asked = {"prompt": PROMPT, "ignore_eos": True, "stream": True, "max_tokens": 1}
            streams = asyncio.run(stream_one_by_one(server, [asked] * requests))
        rows = Recording.load(out).requests.sort_by("request_id").to_pylist()
    waited = [
        stream.words()[1][0] - stream.asked_ns - (row["first_token_ns"] - row["arrival_ns"])
        for stream, row in zip(streams, rows, strict=True)
    ]
    p50, p99 = np.percentile(waited, [50, 99]) / 1e6
    return {"ttft_overhead_p50_ms": round(float(p50), 2), "ttft_overhead_p99_ms": round(float(p99), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--streams", default="1,64,512,1000", help="numbers of simultaneous clients; each number is one measurement"
    )
    parser.add_argument("--tokens", type=int, default=200, help="number of tokens of each stream")
    parser.add_argument("--rate", type=float, default=20.0, help="tokens per second of each stream")
    parser.add_argument("--api-workers", type=int, default=1)
    parser.add_argument("--alone", type=int, default=100, help="number of requests that are sent one after the other")
    args = parser.parse_args()
    alone = overhead(args.alone, args.api_workers)
    print(*(f"{name} {value}" for name, value in alone.items()))
    rows = [measure(int(count), args.tokens, args.rate, args.api_workers) for count in args.streams.split(",")]
    print_table(list(rows[0]), [[str(value) for value in row.values()] for row in rows])
    print(
        json.dumps(
            {"tokens": args.tokens, "rate": args.rate, "api_workers": args.api_workers, **alone, "measured": rows}
        )
    )


if __name__ == "__main__":
    main()
