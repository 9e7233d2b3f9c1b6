"""Ten minutes of clients who come, talk, stop, and hang up: nothing is lost, and memory does not grow."""

import asyncio
import json
from pathlib import Path
from random import Random
from time import monotonic

import pytest

from benchmarks.front_door import Stream, resident_mb
from tests.apiserver.served import TWIN, serving
from tests.budget import soaked

CLIENTS = 40
DOCUMENTS = 50
SOAK_S = 600


async def talk(server, number, until_s, answers):
    """One client: streams, one after the other; every fifth it leaves in the middle."""
    rng = Random(number)
    loop = asyncio.get_running_loop()
    while monotonic() < until_s:
        document, seed = rng.randrange(DOCUMENTS), rng.randrange(20)
        tokens = rng.choice([1, 10, 60])
        body = {"prompt": [document] * 100, "seed": seed, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        transport, stream = await loop.create_connection(lambda body=body: Stream(body), *server.address)
        if rng.random() < 0.2:
            await asyncio.sleep(rng.random() * 0.1)
            transport.abort()
            stream.done.add_done_callback(asyncio.Future.exception)
        else:
            await stream.done
            words, _ = stream.words()
            assert len(words) == tokens
            assert words == answers.setdefault(seed, words)[:tokens] or len(answers[seed]) < tokens
            answers[seed] = max(words, answers[seed], key=len)


@pytest.mark.deep
def test_memory_is_flat(tmp_path):
    long = soaked(SOAK_S)
    with serving(tmp_path, *TWIN, "--speed", 5, "-o", tmp_path / "out") as server:
        answers = {}
        memory = []

        async def run():
            began_s = monotonic()
            clients = [asyncio.create_task(talk(server, at, began_s + long, answers)) for at in range(CLIENTS)]
            for share in (0.3, 1.0):
                await asyncio.sleep(max(began_s + share * long - monotonic(), 0))
                memory.append({kind: sum(map(resident_mb, pids)) for kind, pids in server.processes().items()})
            await asyncio.gather(*clients)

        asyncio.run(run())
        warm, end = memory
        print(json.dumps({"soak_s": long, "warm_mb": warm, "end_mb": end}))
        if long == SOAK_S:  # rows of a recording wait for thousands of others before they are written
            assert all(end[kind] < 1.1 * warm[kind] + 10 for kind in end)
        assert "Traceback" not in server.said
    assert not list(Path(tmp_path / "out").glob(".*"))
