"""The API process's client of the engine: it goes on listening, whatever the API's clients do."""

import asyncio
from pathlib import Path

import zmq
import zmq.asyncio

from tokentwin.apiserver.engine_client import EngineClient
from tokentwin.apiserver.messages import About, Reply, encode


def test_an_answer_that_nobody_waits_for_any_more_does_not_end_the_listening(tmp_path: Path) -> None:
    async def listens() -> None:
        engine = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        engine.bind(f"ipc://{tmp_path / 'engine'}")
        client = EngineClient(f"ipc://{tmp_path / 'engine'}", "api")
        tasks = client.start()
        peer, _ = await engine.recv_multipart()
        client._replies[1] = gone = asyncio.get_running_loop().create_future()
        gone.cancel()  # its scraper hung up; the task that asked has not run since
        await engine.send_multipart([peer, encode(Reply(1, b""))])
        await engine.send_multipart([peer, encode(About("m", 100, [], "", 50, True, 16))])
        await asyncio.wait_for(client.served.wait(), 10)
        for task in tasks:
            task.cancel()
        client._socket.disable_monitor()
        client._socket.close(0)
        engine.close(0)

    asyncio.run(listens())
