"""The real engine behind the API, as the `openai` package and a router see it; transformers gives the answers."""

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from tests.apiserver.served import Server, serving  # noqa: E402
from tests.apiserver.served_command import free_ports, kv_batches  # noqa: E402
from tests.apiserver.test_gateway import until  # noqa: E402
from tests.realengine.test_structured_output import GIVES_UP  # noqa: E402
from tests.realengine.tiny_chat_model import POSITIONS, save_chat_model  # noqa: E402
from tokentwin.apiserver.kv_cache_events.block_hash import BlockHash  # noqa: E402
from tokentwin.realengine.tokenizer import Tokenizer  # noqa: E402

pytestmark = pytest.mark.engine
MODEL = "tiny"
WORDS = [{"role": "user", "content": "Hello there"}]
GREEDY = {"model": MODEL, "temperature": 0, "extra_body": {"ignore_eos": True}}
ENDLESS = {**GREEDY, "max_tokens": POSITIONS - 100}


class Real(NamedTuple):
    """A server, the model that it serves, and the endpoints that replay its KV events."""

    server: Server
    oracle: Any
    texts: Tokenizer
    replays: int

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.server.url, api_key="-", **{"max_retries": 0, **options})

    def continued(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the answer of transformers."""
        answer = self.oracle.generate(
            torch.tensor([list(prompt)]), max_new_tokens=count, min_new_tokens=count, do_sample=False
        )
        return answer[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    folder = tmp_path_factory.mktemp("real")
    oracle = save_chat_model(folder / "model")
    port = free_ports(2)
    published = {
        "endpoint": f"tcp://127.0.0.1:{port}",
        "replay_endpoint": f"tcp://127.0.0.1:{port + 1}",
        "topic": "kv of {model}",
    }
    published["hash_seed"] = "3"
    options = {"--model": folder / "model", "--served-model-name": MODEL, "--device": "cpu", "--dtype": "float32"}
    options |= {"--max-requests": 3, "--num-blocks": 1000, "--kv-events": json.dumps(published)}
    with serving(
        folder, "--enable-prompt-tokens-details", *(part for option in options.items() for part in option)
    ) as server:
        yield Real(server, oracle, Tokenizer(folder / "model"), port + 1)


@pytest.fixture(scope="module")
def client(real: Real) -> Iterator[openai.OpenAI]:
    with real.client() as client:
        yield client


def test_embeddings_are_the_last_hidden_states_of_transformers(real: Real, client: openai.OpenAI) -> None:
    texts = ["Hello there", "What is the capital of France?"]
    tokens = [real.texts.encode(text, special=True) for text in texts]
    for given in (texts, tokens):
        answer = client.embeddings.create(model=MODEL, input=given, encoding_format="float")
        packed = client.embeddings.create(model=MODEL, input=given)  # the package asks for base64
        for prompt, one, other in zip(tokens, answer.data, packed.data, strict=True):
            with torch.no_grad():
                state = real.oracle.model(torch.tensor([prompt])).last_hidden_state[0, -1]
            wanted = torch.nn.functional.normalize(state, dim=0)
            torch.testing.assert_close(torch.tensor(one.embedding), wanted, atol=1e-5, rtol=1e-4)
            assert other.embedding == pytest.approx(one.embedding)
    assert answer.usage.prompt_tokens == sum(map(len, tokens))


def test_logprobs_of_a_prompt_are_those_of_transformers(real: Real, client: openai.OpenAI) -> None:
    """Also when the prompt is in the prefix cache, and longer than the parts in which it is scored."""
    prompt = real.texts.encode("What is the capital of France? " * 12, special=True)
    assert len(prompt) > 70
    with torch.no_grad():
        logprobs = torch.log_softmax(real.oracle(torch.tensor([prompt])).logits[0, :-1], -1)
    wanted = logprobs[torch.arange(len(prompt) - 1), prompt[1:]]
    for _ in range(2):
        more = {"ignore_eos": True, "prompt_logprobs": 2}
        asked = {**GREEDY, "prompt": prompt, "max_tokens": 3, "extra_body": more}
        answer = client.completions.create(**asked, echo=True, logprobs=2)
        (choice,) = answer.choices
        first, *scores = choice.prompt_logprobs
        own = [scored[str(token)] for scored, token in zip(scores, prompt[1:], strict=True)]
        assert first is None and [one["logprob"] for one in own] == pytest.approx(wanted.tolist(), abs=1e-4)
        ranks = (logprobs >= wanted[:, None] - 1e-6).sum(-1)
        assert all(abs(one["rank"] - rank) <= 1 for one, rank in zip(own, ranks.tolist(), strict=True))
        assert choice.logprobs.token_logprobs[1 : len(prompt)] == pytest.approx(wanted.tolist(), abs=1e-4)
        assert len(choice.logprobs.tokens) == len(prompt) + 3
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
    plain = client.completions.create(**{**asked, "extra_body": {"ignore_eos": True}})
    assert plain.usage.prompt_tokens_details.cached_tokens > 0


def test_answers_are_those_of_transformers(real: Real, client: openai.OpenAI) -> None:
    prompt = real.texts.encode("Hello there", special=True)
    wanted = real.continued(prompt, 24)
    answer = client.completions.create(prompt="Hello there", max_tokens=24, logprobs=1, **GREEDY)
    (choice,) = answer.choices
    assert choice.text == real.texts.decode(wanted) and choice.finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 24)
    with torch.no_grad():
        logits = real.oracle(torch.tensor([[*prompt, *wanted]])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits, -1)[torch.arange(24), wanted]
    assert choice.logprobs.token_logprobs == pytest.approx(expected.tolist(), abs=1e-4)
    message = client.chat.completions.create(messages=WORDS, max_completion_tokens=24, **GREEDY).choices[0].message
    assert message.content == real.texts.decode(real.continued(real.texts.chat(WORDS), 24))


def test_streams_say_the_same(real: Real, client: openai.OpenAI) -> None:
    wanted = real.texts.decode(real.continued(real.texts.chat(WORDS), 40))
    asked = {**GREEDY, "messages": WORDS, "max_tokens": 40}
    *pieces, last = client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == wanted
    assert last.usage.completion_tokens == 40 and pieces[-1].choices[0].finish_reason == "length"
    stop = wanted[20:22]
    with client.chat.completions.stream(stop=stop, **asked) as stream:
        (choice,) = stream.get_final_completion().choices
    assert (choice.message.content, choice.finish_reason) == (wanted[: wanted.index(stop)], "stop")


def test_a_tool_that_must_be_called_is_called_by_its_schema(client: openai.OpenAI) -> None:
    place = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
    schema = {**place, "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    asked = {**GREEDY, "messages": WORDS, "max_tokens": 80, "tools": [tool], "parallel_tool_calls": False}
    named = {"type": "function", "function": {"name": "weather"}}
    for choice, finish in ((named, "stop"), ("required", "tool_calls")):
        (whole,) = client.chat.completions.create(tool_choice=choice, **asked).choices
        (call,) = whole.message.tool_calls
        assert (whole.finish_reason, call.function.name) == (finish, "weather")
        assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
        with client.chat.completions.stream(tool_choice=choice, **asked) as stream:
            (streamed,) = stream.get_final_completion().choices
        (again,) = streamed.message.tool_calls
        assert (streamed.finish_reason, again.function.name) == (finish, "weather")
        assert again.function.arguments == call.function.arguments
    (cut,) = client.chat.completions.create(tool_choice="required", **{**asked, "max_tokens": 3}).choices
    assert cut.finish_reason == "length" and not cut.message.tool_calls and cut.message.content


def test_an_answer_whose_grammar_gives_up_is_an_error(real: Real, client: openai.OpenAI) -> None:
    hard = {"structured_outputs": {"json": GIVES_UP}}
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError, match="grammar of the answer gave up"):
            client.completions.create(model=MODEL, prompt="Hello", max_tokens=40, stream=stream, extra_body=hard)
    metrics = real.server.ask("GET", "/metrics").body.decode()
    (ended,) = re.findall(r'request_success_total{.*finished_reason="error".*} (\S+)', metrics)
    assert float(ended) == 2 and "Traceback" not in real.server.said


def test_what_is_done_to_logits_is_seen_in_the_answer(real: Real, client: openai.OpenAI) -> None:
    prompt = real.texts.encode("Hello there", special=True)
    first, *_ = real.continued(prompt, 1)
    asked = {**GREEDY, "prompt": "Hello there", "max_tokens": 6}

    def tokens(**more: Any) -> list[int]:
        extra = {"extra_body": {"ignore_eos": True, "return_token_ids": True, **more}}
        return client.completions.create(**{**asked, **extra}).choices[0].token_ids

    assert tokens()[0] == first
    assert first not in tokens(logit_bias={str(first): -100})
    assert set(tokens(allowed_token_ids=[5, 9])) <= {5, 9}
    assert tokens(stop_token_ids=[first]) == [first]
    assert first not in tokens(stop_token_ids=[first], min_tokens=5)[:5]
    (choice,) = client.completions.create(**asked, logprobs=3).choices
    logprobs = choice.logprobs
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert max(top.values()) == top[token] == pytest.approx(logprob, abs=1e-5) and len(top) == 3


def test_many_at_once_are_answered_as_each_alone(real: Real) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=real.server.url, api_key="-", max_retries=20) as client:

            async def one(at: int) -> str:
                asked = {**GREEDY, "prompt": "ab" * at, "max_tokens": 12}
                stream = await client.completions.create(stream=True, **asked)
                return "".join([piece.choices[0].text async for piece in stream])

            return await asyncio.gather(*map(one, range(1, 9)))  # more than there is room for: it asks again after 429

    prompts = [real.texts.encode("ab" * at, special=True) for at in range(1, 9)]
    assert asyncio.run(ask()) == [real.texts.decode(real.continued(prompt, 12)) for prompt in prompts]


def test_refusals_and_timeouts_are_its_exceptions(real: Real, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt=5)
    assert refused.value.param == "body.prompt" and "must be a string or a list" in refused.value.message
    with pytest.raises(openai.BadRequestError, match="more than 4096"):
        client.completions.create(prompt="a" * 200, **ENDLESS)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt="Hello")
    streams = [client.completions.create(prompt="Hello", stream=True, **ENDLESS) for _ in range(3)]
    with pytest.raises(openai.RateLimitError) as refused:
        client.completions.create(prompt="Hello", **GREEDY)
    assert refused.value.response.headers["Retry-After"] == "1"
    for stream in streams[1:]:
        stream.close()
    with pytest.raises(openai.RateLimitError):  # of all, when there is not room for each
        client.completions.create(prompt="Hello", n=3, **{**ENDLESS, "temperature": 1})
    streams[0].close()
    with pytest.raises(openai.BadRequestError, match="n: 4 answers are more than 3"):  # and there never is
        client.completions.create(prompt="Hello", n=4, **{**ENDLESS, "temperature": 1})
    patient = real.client(max_retries=20)
    patient.completions.create(prompt="Hello", max_tokens=1, **GREEDY)  # until those before are gone
    with real.client(timeout=0.3, max_retries=20) as hurried, pytest.raises(openai.APITimeoutError):
        hurried.with_options(max_retries=0).completions.create(prompt="Hello", **ENDLESS)
    # nothing of them is left that would take room
    assert patient.completions.create(prompt="Hello", max_tokens=1, **GREEDY).usage.completion_tokens == 1


def test_kv_events_tell_what_was_computed_and_that_a_new_engine_knows_nothing(real, client):
    before = len(kv_batches(real.replays))
    prompt = [*range(90, 50, -1)]
    asked = {**GREEDY, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    (choice,) = client.completions.create(prompt=prompt, max_tokens=30, **asked).choices
    known = [*prompt, *choice.token_ids]
    batches = kv_batches(real.replays, before)
    assert {topic for topic, _, _ in batches} == {f"kv of {MODEL}"}
    stored = [event for _, _, events in batches for event in events]
    assert {event["type"] for event in stored} == {"BlockStored"}
    assert [token for event in stored for token in event["token_ids"]] == known[:64]  # the last token was not computed
    hash, parents = BlockHash("sha256", "3").hash_block, [None]
    for first in range(0, 64, 16):
        parents.append(hash(parents[-1], known[first : first + 16]))
    names = [int.from_bytes(name[-8:], "big") for name in parents if name is not None]
    assert [name for event in stored for name in event["block_hashes"]] == names
    client.completions.create(prompt=prompt, max_tokens=1, **GREEDY)
    assert len(kv_batches(real.replays)) == before + len(batches)  # what is known is not stored again

    (router,) = real.server.processes()["engine"]
    engines = [int(engine) for engine in Path(f"/proc/{router}/task/{router}/children").read_text().split()]
    for number, health in ((signal.SIGSTOP, 503), (signal.SIGCONT, 200)):
        os.kill(engines[-1], number)
        until(lambda health=health: real.server.ask("GET", "/health").status == health)
    for engine in engines:
        os.kill(engine, signal.SIGKILL)
    until(lambda: real.server.ask("GET", "/ready").status == 503)
    until(lambda: real.server.ask("GET", "/ready").status == 200)
    assert kv_batches(real.replays) == [(f"kv of {MODEL}", 0, [{"type": "AllBlocksCleared"}])]
