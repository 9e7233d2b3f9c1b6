"""The `openai` package, as people use it: whole and streamed, sync and async, refused and timed out."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.apiserver.served import TWIN, serving

WORDS = [{"role": "user", "content": "Hello"}]
ENDLESS = {"max_tokens": 4000, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("twin")
    (folder / "keys").write_text("a-key\n")
    keyed = ("--api-key-file", folder / "keys")
    with serving(folder, *TWIN, "--speed", 10, "--max-requests", 3, "--output-tokens", 12, *keyed) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url, api_key="a-key", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client):
    (model,) = client.models.list().data
    return model.id


def test_whole_answers(client, model):
    answer = client.chat.completions.create(model=model, messages=WORDS, max_completion_tokens=5, logprobs=True)
    (choice,) = answer.choices
    assert choice.finish_reason == "length" and len(choice.message.content.split()) == 5
    assert len(choice.logprobs.content) == answer.usage.completion_tokens == 5
    answer = client.completions.create(model=model, prompt="Hello", max_tokens=3, seed=1, user="somebody")
    assert len(answer.choices[0].text.split()) == 3


def test_streams(client, model):
    asked = {"model": model, "max_tokens": 6, "stream": True, "stream_options": {"include_usage": True}}
    *pieces, last = client.chat.completions.create(messages=WORDS, **asked)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert len(text.split()) == last.usage.completion_tokens == 6 and not last.choices
    *pieces, last = client.completions.create(prompt="Hello", **asked)
    assert len("".join(piece.choices[0].text for piece in pieces).split()) == last.usage.completion_tokens == 6


def test_a_helper_that_gathers_a_stream(client, model):
    with client.chat.completions.stream(model=model, messages=WORDS, max_tokens=40) as stream:
        assert sum(event.type == "content.delta" for event in stream) >= 1
        message = stream.get_final_completion().choices[0].message
    assert len(message.content.split()) == 12


def test_many_at_once(server, model):
    async def ask():
        async with openai.AsyncOpenAI(base_url=server.url, api_key="a-key", max_retries=20) as client:

            async def one(tokens):
                stream = await client.chat.completions.create(
                    model=model, messages=WORDS, max_tokens=tokens, stream=True
                )
                return len("".join([piece.choices[0].delta.content or "" async for piece in stream]).split())

            return await asyncio.gather(*map(one, range(1, 13)))  # more than there is room for: it asks again after 429

    assert asyncio.run(ask()) == list(range(1, 13))


def test_refusals_are_its_exceptions(server, client, model):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=model, prompt="Hello", n=2)
    assert refused.value.param == "n"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt="Hello")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=server.url, api_key="no-key").models.list()
    streams = [client.completions.create(model=model, prompt="Hello", stream=True, **ENDLESS) for _ in range(3)]
    with pytest.raises(openai.RateLimitError) as refused:
        client.completions.create(model=model, prompt="Hello")
    assert refused.value.response.headers["Retry-After"] == "1"
    for stream in streams:
        stream.close()


def test_its_timeout_ends_the_request(client, model):
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).completions.create(model=model, prompt="Hello", **ENDLESS)
    for _ in range(3):  # nothing of it is left that would take room
        patient = client.with_options(max_retries=20)
        assert patient.completions.create(model=model, prompt="Hello", max_tokens=1).usage.completion_tokens == 1
