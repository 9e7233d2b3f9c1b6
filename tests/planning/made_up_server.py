"""A server with the answers that a test gives it, for clients of servers."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from aiohttp import web


@contextmanager
def made_up(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Iterator[str]:
    """Run a server whose completions and chats are `answer`, and whose only model is `m`; yield its URL."""
    started, stopped, urls = threading.Event(), asyncio.Event(), []
    loop = asyncio.new_event_loop()

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": 4096}]})

    async def serve() -> None:
        app = web.Application()
        app.add_routes([web.get("/v1/models", models), web.post("/v1/{kind:.*}", answer)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        started.set()
        await stopped.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    started.wait(30)
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join(30)
        loop.close()
