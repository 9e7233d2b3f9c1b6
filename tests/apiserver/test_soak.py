"""Long service: clients who come, talk, stop and hang up lose nothing, and memory does not grow."""

import asyncio
import json
from pathlib import Path
from random import Random
from time import monotonic

import pytest

from lab.benchmarks.front_door import Stream, resident_mb
from tests.apiserver.served import TWIN, serving
from tests.budget import soaked

CLIENTS = 40
DOCUMENTS = 50
SOAK_S = 600


async def talk(server, number, until_s, answers):
    """Stream one client's answers, one after the other; it leaves every fifth in the middle."""
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


UNIQUE_S = 7200
PROMPT_TOKENS = 1000
RATE_PER_S = 10


async def prompt_that_never_comes_again(server, number):
    """Send one request whose prompt shares no KV block with any other, and read its answer."""
    rng = Random(number)
    prompt = [rng.randrange(30_000) for _ in range(PROMPT_TOKENS)]
    body = {"prompt": prompt, "max_tokens": 20, "ignore_eos": True, "stream": True, "user": f"user {number}"}
    loop = asyncio.get_running_loop()
    _, stream = await loop.create_connection(lambda: Stream(body), *server.address)
    await stream.done


@pytest.mark.deep
@pytest.mark.timeout(UNIQUE_S + 600)
def test_memory_reaches_a_plateau_while_every_prompt_is_new(tmp_path):
    """Two hours fill the KV cache of each replica many times over, and with it whatever remembers prompts."""
    long = soaked(UNIQUE_S)
    with serving(tmp_path, *TWIN, "--replicas", 2, "--router", "prefix-affinity", "--speed", 5) as server:
        memory = []

        async def run():
            began_s, number, pending = monotonic(), 0, set()
            while (passed_s := monotonic() - began_s) < long:
                if passed_s >= len(memory) * long / 24:
                    memory.append({kind: sum(map(resident_mb, pids)) for kind, pids in server.processes().items()})
                    print(json.dumps({"s": round(passed_s), "requests": number, "mb": memory[-1]}), flush=True)
                pending.add(task := asyncio.create_task(prompt_that_never_comes_again(server, number)))
                task.add_done_callback(pending.discard)
                number += 1
                await asyncio.sleep(max(began_s + number / RATE_PER_S - monotonic(), 0))
            await asyncio.gather(*pending)

        asyncio.run(run())
        if long == UNIQUE_S:  # a table that grows is copied, so that memory goes up and down on its plateau
            most = {kind: [one[kind] for one in memory] for kind in memory[-1]}
            third = len(memory) // 3
            assert all(max(mb[-third:]) < 1.02 * max(mb[third:-third]) + 2 for mb in most.values()), memory
        assert "Traceback" not in server.said
