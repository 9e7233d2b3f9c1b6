"""A thousand hostile requests: memory stays within 400 MB of its rest, and good requests are answered meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import chain, count, islice
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from tests.apiserver.served import TWIN, Server, serving
from tests.apiserver.test_bodies import sends
from tests.budget import soaked

REQUESTS = 1000
AT_ONCE = 40
MOST_MB = 400
SIZE = 4_000_000
COMPLETE, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
SAID = '{"messages":[{"role":"user","content":"a"}],'


def listed(begin: str, item: str, end: str) -> bytes:
    """Return a body of 4 MB, in which `item` is repeated as often as a body may have commas."""
    times = min((SIZE - len(begin) - len(end)) // (len(item) + 1), 520_000 // (1 + item.count(",")))
    padding = " " * (SIZE - len(begin) - len(end) - times * (len(item) + 1))
    return (begin + padding + ",".join([item] * times) + end).encode()


def fields(begin: str, value: str, end: str) -> bytes:
    return (begin + ",".join(f'"{name}":{value}' for name in range(SIZE // 12)) + end).encode()


def schema(number: int) -> dict[str, Any]:
    """Return a new schema that takes about a minute to compile."""
    part = {"anyOf": [{"type": "object", "properties": {f"k{name}": {} for name in range(40)}}] * 3}
    nested: dict[str, Any] = {"type": "string", "pattern": f"^(.*a.{{{20 + number % 9}}}){{9}}$"}
    for _ in range(6):
        nested = {"anyOf": [{"type": "object", "properties": {"a": nested, "b": nested}}, part]}
    return nested


def hostile(number: int) -> Iterator[tuple[str, bytes]]:
    """Yield the paths and bodies of hostile requests; some are new for each `number`."""
    yield COMPLETE, b'{"prompt":[' + b"1," * (SIZE // 2 - 10) + b"1]}"
    yield COMPLETE, listed('{"prompt":[1,', "null", "]}")
    yield COMPLETE, listed('{"prompt":["a",', "0", "]}")
    yield COMPLETE, listed('{"prompt":[', "[1]", "]}")
    yield COMPLETE, listed('{"prompt":[', "1", "]}")
    yield COMPLETE, b'{"prompt":"' + b" " * (SIZE - 20) + b'"}'
    yield COMPLETE, b'{"prompt":"' + b"a b." * (SIZE // 4 - 5) + b'"}'
    yield COMPLETE, b'{"truncate_prompt_tokens":9,"prompt":"' + b"a b." * (SIZE // 4 - 20) + b'"}'
    yield COMPLETE, fields('{"prompt":"a","logit_bias":{', '"x"', "}}")
    yield COMPLETE, json.dumps({"prompt": "a", "structured_outputs": {"json": schema(number)}}).encode()
    yield COMPLETE, json.dumps({"prompt": ["a"] * 4096, "n": 128, "temperature": 1}).encode()
    yield CHAT, listed('{"messages":[', "0", "]}")
    yield CHAT, listed('{"messages":[', "{}", "]}")
    yield CHAT, listed('{"messages":[', '{"role":"user"}', "]}")
    yield CHAT, listed('{"messages":[{"role":"user","content":[', "0", "]}]}")
    yield CHAT, listed('{"messages":[{"role":"user","content":[', '{"type":"text","text":""}', "]}]}")
    yield CHAT, listed('{"messages":[{"role":"user","content":"a","more":[', "[]", "]}]}")
    yield CHAT, listed(SAID + '"tools":[', "{}", "]}")
    yield CHAT, listed(SAID + '"chat_template_kwargs":{"a":[', "{}", "]}}")
    yield CHAT, fields(SAID, "0", "}")
    yield CHAT, fields(SAID + '"metadata":{', "0", "}}")
    yield TOKENIZE, b'{"prompt":"' + b"a b." * (SIZE // 4 - 5) + b'"}'
    yield "/detokenize", listed('{"tokens":[', "5", "]}")
    yield "/v1/embeddings", listed('{"input":[[1],', "[null]", "]}")


def peak_mb(server: Server) -> float:
    """Return the sum of the largest resident memory of each process so far."""
    pids = [pid for kind in server.processes().values() for pid in kind]
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


@pytest.mark.deep
@pytest.mark.timeout(3600)
def test_a_thousand_hostile_requests_take_little_memory(tmp_path: Path) -> None:
    requests = int(soaked(REQUESTS))
    with serving(tmp_path, *TWIN, "--client-timeout", 20) as server:
        server.complete(), server.chat()
        rest, answers, waits = peak_mb(server), [], []

        async def attack(queue: Iterator[tuple[str, bytes]]) -> None:
            for path, body in queue:
                try:
                    reader, writer = await sends(server.address[1], len(body), path, body)
                    answers.append(int((await reader.readline()).split()[1]))
                except (ConnectionError, IndexError):
                    answers.append(0)  # refused before the body was read
                else:
                    writer.close()

        async def run() -> None:
            port = server.address[1]
            unfinished = [await sends(port, SIZE, COMPLETE, b" " * (SIZE - 1)) for _ in range(150)]
            queue = islice(chain.from_iterable(map(hostile, count())), requests)
            attacks = [asyncio.create_task(attack(queue)) for _ in range(AT_ONCE)]
            while not all(task.done() for task in attacks):
                began_s = monotonic()
                assert (await asyncio.to_thread(server.complete)).status == 200
                waits.append(monotonic() - began_s)
                await asyncio.sleep(0.1)
            await asyncio.gather(*attacks)
            for _, writer in unfinished:
                writer.close()

        asyncio.run(run())
        peak = peak_mb(server)
        counts = {status: answers.count(status) for status in sorted(set(answers))}
        print(json.dumps({"rest_mb": rest, "peak_mb": peak, "answers": counts, "longest_wait_s": max(waits)}))
        assert peak - rest < MOST_MB and len(answers) == requests and 500 not in counts
        assert "Traceback" not in server.said
