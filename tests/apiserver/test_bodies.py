"""Bodies that are too many, too long or wrong in a million places take little memory, and nobody waits for them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.budget import examples
from tokentwin.apiserver.filler import PlainTexts
from tokentwin.apiserver.openai_api import bodies
from tokentwin.apiserver.openai_api.api import refusals
from tokentwin.apiserver.openai_api.bodies import Bodies
from tokentwin.apiserver.openai_api.connection import listen
from tokentwin.apiserver.openai_api.embeddings import EmbeddingRequest
from tokentwin.apiserver.openai_api.prompt_length import PromptLength
from tokentwin.apiserver.openai_api.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tokentwin.apiserver.openai_api.refusal import Refusal

MANY = 5000
CHAT = {"messages": [{"role": "user", "content": "a"}]}
WRONG: list[tuple[Any, dict[str, Any]]] = [
    (CompletionRequest, {"prompt": [1, *[None] * MANY]}),
    (CompletionRequest, {"prompt": ["a", *[0] * MANY]}),
    (CompletionRequest, {"prompt": [[1], *[[]] * MANY]}),
    (CompletionRequest, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(MANY)), "x")}),
    (CompletionRequest, {"prompt": "a", "stop": [0] * MANY}),
    (CompletionRequest, {"prompt": "a", "stop_token_ids": [-1] * MANY}),
    (CompletionRequest, {"prompt": "a", "bad_words": [0] * MANY}),
    (CompletionRequest, {"prompt": "a", "allowed_token_ids": [-1] * MANY}),
    (CompletionRequest, {"prompt": "a", "structured_outputs": {"choice": [0] * MANY}}),
    (CompletionRequest, {"prompt": "a", "stream_options": dict.fromkeys(map(str, range(MANY)), 0)}),
    (ChatRequest, {"messages": [0] * MANY}),
    (ChatRequest, {"messages": [{}] * MANY}),
    (ChatRequest, {"messages": [{"role": "user", "content": [0] * MANY}]}),
    (ChatRequest, {"messages": [{"role": "user", "content": [{}] * MANY}]}),
    (ChatRequest, {**CHAT, "tools": [0] * MANY}),
    (ChatRequest, {**CHAT, "metadata": dict.fromkeys(map(str, range(MANY)), 0)}),
    (ChatRequest, {**CHAT, **dict.fromkeys(map(str, range(MANY)), 0)}),
    (ChatRequest, {**CHAT, "response_format": dict.fromkeys(map(str, range(MANY)), 0)}),
    (ChatRequest, {**CHAT, "tool_choice": dict.fromkeys(map(str, range(MANY)), 0)}),
    (TokenizeRequest, {"messages": [0] * MANY}),
    (DetokenizeRequest, {"tokens": [-1] * MANY}),
    (EmbeddingRequest, {"input": [[1], *[[None]] * MANY]}),
]


@pytest.mark.parametrize(("kind", "body"), WRONG)
def test_a_body_that_is_wrong_everywhere_has_few_errors(kind: Any, body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as wrong:
        kind.model_validate_json(json.dumps(body))
    assert wrong.value.error_count() <= 6


def served(client: Callable[[int], Awaitable[None]], within_s: float = 60.0, limit: int = 1 << 20) -> None:
    """Run `client(port)` against a server that answers the length of each body."""

    async def run() -> None:
        taken = Bodies(limit, within_s)

        async def length(request: web.Request) -> web.Response:
            async with taken.take(request) as given:
                return web.Response(text=str(len(given._data)))

        app = web.Application(middlewares=[refusals])
        app.router.add_post("/", length)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await runner.setup()
        assert runner.server is not None
        server = await listen(runner.server, 60.0, host="127.0.0.1", port=0)
        try:
            async with asyncio.timeout(60):
                await client(server.sockets[0].getsockname()[1])
            assert taken._left == max(bodies._BUDGET, 4 * limit) and not taken._unfinished
        finally:
            server.close()
            await runner.cleanup()
            taken.close()

    asyncio.run(run())


Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def sends(port: int, length: int, path: str, sent: bytes) -> Ends:
    """Send the beginning of a body of `length`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    writer.write(head.encode() + sent)
    await writer.drain()
    return reader, writer


async def status(ends: Ends) -> int:
    return int((await ends[0].readline()).split()[1])


def test_the_longest_unfinished_body_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_BUDGET", 0)  # so that four of the longest bodies are the budget

    async def client(port: int) -> None:
        long = [await sends(port, 1 << 20, "/", b" " * size) for size in (1_000_000, 1_040_000, 1_020_000, 1_010_000)]
        short = await sends(port, 100, "/", b" " * 100)
        assert await status(short) == 200
        other = await sends(port, 500_000, "/", b" " * (500_000))
        assert await status(other) == 200, "a shorter body is taken"
        assert await status(long[1]) == 503, "the longest gave way"
        for at, size in ((0, 1_000_000), (2, 1_020_000), (3, 1_010_000)):
            long[at][1].write(b" " * ((1 << 20) - size))
            assert await status(long[at]) == 200
        for _, writer in (*long, short, other):
            writer.close()

    served(client)


def test_a_body_that_is_too_long_or_too_slow_is_refused() -> None:
    async def client(port: int) -> None:
        long, slow = await sends(port, 2 << 20, "/", b" " * ((1 << 20) + 1)), await sends(port, 100, "/", b" " * 99)
        assert (await status(long), await status(slow)) == (413, 408)
        for _, writer in (long, slow):
            writer.close()

    served(client, within_s=1.0)


class Counted(PlainTexts):
    """A tokenizer that counts the characters that it has tokenised."""

    def __init__(self) -> None:
        super().__init__(1000)
        self.characters = 0

    def encode(self, text: str, special: bool = False) -> list[int]:
        self.characters += len(text)
        return super().encode(text, special)


@given(st.text(" abde", max_size=300), st.integers(1, 120), st.sampled_from(["all", "first"]), st.integers(1, 64))
@examples(5)
def test_tokens_are_those_of_the_whole_text(text: str, most: int, keeps: Any, first: int) -> None:
    texts = PlainTexts(1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokentwin.apiserver.openai_api.prompt_length._FIRST", first)
        whole = texts.encode(text)
        try:
            tokens = PromptLength(most, keeps).tokens(texts, text, False, "prompt")
        except Refusal:
            assert keeps == "all" and len(whole) > most
        else:
            assert tokens == (whole if keeps == "all" else whole[:most])


@pytest.mark.parametrize("keeps", ["all", "first", "last"])
def test_a_long_text_is_tokenised_no_further_than_needed(keeps: Any) -> None:
    texts = Counted()
    length = PromptLength(1000, keeps)
    if keeps == "all":
        with pytest.raises(Refusal, match="1000 tokens"):
            length.tokens(texts, " " * 4_000_000, False, "prompt")
        assert texts.characters == 0
    else:
        assert len(length.tokens(texts, " " * 4_000_000, False, "prompt")) == 1000
        assert texts.characters == 1 << 17
    texts.characters = 0
    with pytest.raises(Refusal, match="more than 30000 tokens"):
        PromptLength(30_000).tokens(texts, "." * 140_000, False, "prompt")
    assert texts.characters == 1 << 17


def test_the_middle_of_a_text_does_not_matter_to_its_last_tokens() -> None:
    texts, words = PlainTexts(1000), " bada bade" * 40_000
    last = PromptLength(500, "last").tokens(texts, words, False, "prompt")
    assert last == texts.encode(words)[-500:]
