"""A client that does not send, or does not read, is dropped; nobody else waits for it."""

import asyncio
import json

from aiohttp import web

from tokentwin.apiserver.openai_api.connection import listen

PATIENCE_S = 0.3


def served(client, handler):
    """Return the result of `client(host, port)` against a server whose only handler is `handler`."""

    async def run():
        app = web.Application()
        app.router.add_get("/", handler)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await runner.setup()
        server = await listen(runner.server, PATIENCE_S, host="127.0.0.1", port=0)
        try:
            async with asyncio.timeout(60):
                return await client(*server.sockets[0].getsockname())
        finally:
            server.close()
            await runner.cleanup()

    return asyncio.run(run())


async def hello(request):
    return web.Response(text="hello")


def test_a_client_that_does_not_read_is_dropped_and_its_handler_ends():
    ended = []

    async def endless(request):
        response = web.StreamResponse()
        try:
            await response.prepare(request)
            while True:
                await response.write(bytes(1 << 16))
        finally:
            ended.append(request)

    async def client(host, port):
        _, writer = await asyncio.open_connection(host, port, limit=1 << 10)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        while not ended:
            await asyncio.sleep(0.01)
        writer.close()

    served(client, endless)
    assert len(ended) == 1


def test_a_client_that_reads_slowly_is_kept():
    async def long(request):
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(80):
            await response.write(bytes(1 << 16))
        return response

    async def client(host, port):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        got = 0
        while data := await reader.read(1 << 18):
            got += len(data)
            await asyncio.sleep(PATIENCE_S / 8)
        writer.close()
        return got

    assert served(client, long) > 80 << 16


def test_heads_that_never_end_are_dropped_while_others_are_answered():
    async def client(host, port):
        silent = [await asyncio.open_connection(host, port) for _ in range(20)]
        for at, (_, writer) in enumerate(silent):
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nX-"[: 3 * at])
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).endswith(b"hello")
        assert [await reader.read() for reader, _ in silent] == [b""] * 20
        for _, connection in [*silent, (reader, writer)]:
            connection.close()

    served(client, hello)


def test_what_is_no_http_is_refused_in_openais_words():
    async def client(host, port):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"\x16\x03\x01\x02\x00\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return answer

    head, _, body = served(client, hello).partition(b"\r\n\r\n")
    assert b" 400 " in head
    assert json.loads(body)["error"]["code"] == 400
