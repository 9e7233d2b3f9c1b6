"""Beam search: against all answers of a small model, and on a twin."""

import asyncio
from itertools import product
from math import log

import pytest

from tests.apiserver.served import TWIN, serving
from tokentwin.apiserver.messages import Output
from tokentwin.apiserver.openai_api.beam_search import beam_search
from tokentwin.realengine.logit_rules import Logprob

END = 3
PROMPT = [0, 1]


def logprob(before, token):
    """Return the logprob of a token after another, in a model with four tokens."""
    weights = [1 + (7 * before + 5 * other) % 11 for other in range(4)]
    return log(weights[token] / sum(weights))


async def ask(prompts, kept=4):
    outputs = []
    for number, prompt in enumerate(prompts):
        likeliest = sorted(((token, logprob(prompt[-1], token)) for token in range(4)), key=lambda one: -one[1])[:kept]
        outputs.append(Output(number, [likeliest[0][0]], [Logprob(likeliest[0][1], likeliest)]))
    return outputs


def every_answer(most, penalty):
    """Return (score, tokens) of every answer of up to `most` tokens, the best first."""
    scored = []
    for length in range(1, most + 1):
        for answer in product(range(4), repeat=length):
            ends = answer[-1] == END
            if END in answer[:-1] or not (ends or length == most):
                continue
            total = sum(map(logprob, [PROMPT[-1], *answer], answer))
            tokens = list(answer[:-1] if ends else answer)
            scored.append((total / (len(PROMPT) + len(tokens)) ** penalty, tokens))
    return sorted(scored, reverse=True)


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.5])
def test_with_enough_beams_it_finds_the_best_of_all_answers(penalty):
    found = asyncio.run(beam_search(ask, PROMPT, 81, 4, END, penalty, keeps_end=False))
    best = every_answer(4, penalty)[: len(found)]
    assert len(found) == 81
    assert [beam.total / (2 + len(beam.tokens)) ** penalty for beam in found] == pytest.approx([s for s, _ in best])
    assert found[0].tokens == best[0][1]
    assert {beam.finish for beam in found} == {"stop", "length"}


def test_without_an_end_all_beams_are_whole_and_differ():
    found = asyncio.run(beam_search(ask, PROMPT, 3, 6, None, 1.0, keeps_end=False))
    assert [len(beam.tokens) for beam in found] == [6, 6, 6]
    assert len({tuple(beam.tokens) for beam in found}) == 3
    for beam in found:
        assert beam.total == pytest.approx(sum(map(logprob, [PROMPT[-1], *beam.tokens], beam.tokens)))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("twin"), *TWIN, "--speed", 2, "--enable-sleep-mode") as server:
        yield server


def metric(server, name):
    """Return the number of a metric that has one series."""
    lines = server.ask("GET", "/metrics").body.decode().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}{{"))
    return float(line.split()[-1])


def test_a_twin_answers_with_beams(server):
    body = {"prompt": ["Hello", "Hello"], "n": 2, "max_tokens": 4, "temperature": 0, "use_beam_search": True}
    document = server.complete(**body, logprobs=1).document
    texts = [choice["text"] for choice in document["choices"]]
    assert len(texts) == 4 and texts[:2] == texts[2:] and texts[0] != texts[1]
    assert document["usage"]["completion_tokens"] == 16
    assert all(len(choice["logprobs"]["tokens"]) == 4 for choice in document["choices"])
    chat = server.chat(n=3, max_tokens=2, temperature=0, use_beam_search=True).document
    assert len({choice["message"]["content"] for choice in chat["choices"]}) == 3


@pytest.mark.parametrize(
    "field, body",
    [
        ("stream", {"stream": True}),
        ("n", {"n": 11}),
        ("stop", {"stop": "x"}),
        ("presence_penalty", {"presence_penalty": 0.5}),
        ("best_of", {"best_of": 2}),
        ("echo", {"echo": True, "logprobs": 1}),
        ("length_penalty", {"use_beam_search": False, "length_penalty": 2}),
    ],
)
def test_what_beams_cannot_follow_is_refused_by_name(server, field, body):
    refused = server.complete(**{"use_beam_search": True, "max_tokens": 2, **body})
    assert refused.status == 400 and refused.error["param"] == field


def test_sagemakers_path_takes_chats_texts_and_embeddings(server):
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "temperature": 0}
    whole, invoked = (server.ask("POST", path, chat).document for path in ("/v1/chat/completions", "/invocations"))
    assert whole["choices"] == invoked["choices"] and whole.keys() == invoked.keys()
    assert server.ask("POST", "/invocations", {"prompt": "a", "max_tokens": 1}).document["object"] == "text_completion"
    assert server.ask("POST", "/invocations", {"input": "a" * 20_000}).document["object"] == "list"
    for body in ({"model": "x"}, b"[1]", b"{"):
        assert server.ask("POST", "/invocations", body).status == 400


def test_requests_wait_while_a_twin_sleeps(server):
    def asleep():
        return server.ask("GET", "/is_sleeping").document["is_sleeping"]

    def state():
        lines = server.ask("GET", "/metrics").body.decode().splitlines()
        return [line.split()[-1] for line in lines if line.startswith("vllm:engine_sleep_state")]

    assert not asleep() and state() == ["1", "0", "0"]
    assert server.ask("POST", "/sleep?level=1").document == {"status": "sleeping", "level": 1}
    assert asleep() and state() == ["0", "1", "0"]

    async def answered_meanwhile():
        waiting = asyncio.create_task(asyncio.to_thread(server.complete, max_tokens=2))
        await asyncio.sleep(0.3)
        early = waiting.done()
        woken = await asyncio.to_thread(server.ask, "POST", "/wake_up")
        return early, woken.document, (await waiting).status

    early, woken, status = asyncio.run(answered_meanwhile())
    assert (early, woken, status) == (False, {"status": "awake", "tags": None}, 200)
    assert not asleep() and state() == ["1", "0", "0"]
    for wrong in (
        "/sleep?level=2",
        "/sleep?mode=keep",
        "/sleep?levle=0",
        "/sleep?level=0&level=1",
        "/wake_up?tags=weights",
    ):
        assert server.ask("POST", wrong).status == 400


def test_a_sleep_aborts_what_runs_and_forgets_cached_prompts(server):
    prompt = [7] * 512
    assert server.complete(prompt=prompt, max_tokens=1).status == 200

    async def aborted():
        long = asyncio.create_task(asyncio.to_thread(server.complete, max_tokens=8000, ignore_eos=True))
        while not (await asyncio.to_thread(metric, server, "vllm:num_requests_running") or long.done()):
            await asyncio.sleep(0.05)
        await asyncio.to_thread(server.ask, "POST", "/sleep?level=1")
        return (await long).choice["finish_reason"]

    assert asyncio.run(aborted()) == "abort"
    server.ask("POST", "/wake_up")

    before = metric(server, "vllm:prefix_cache_hits_total")
    server.complete(prompt=prompt, max_tokens=1)
    assert metric(server, "vllm:prefix_cache_hits_total") == before
    server.complete(prompt=prompt, max_tokens=1)
    assert metric(server, "vllm:prefix_cache_hits_total") > before


def test_a_twin_shows_metrics_that_are_set_by_hand(server):
    given = {"vllm:num_requests_waiting": 30, "vllm:kv_cache_usage_perc": {"0": 0.9}}
    assert server.ask("PUT", "/admin/metrics", given).document == given
    assert metric(server, "vllm:num_requests_waiting") == 30 and metric(server, "vllm:kv_cache_usage_perc") == 0.9
    server.complete(max_tokens=2)
    assert metric(server, "vllm:num_requests_waiting") == 30
    assert server.ask("GET", "/admin/metrics").document == given
    for wrong in ({"vllm:no": 1}, {"vllm:num_requests_waiting": "1"}, {"vllm:time_to_first_token_seconds": 1}):
        assert server.ask("PUT", "/admin/metrics", wrong).status == 400
    refused = server.ask("PUT", "/admin/metrics", {"vllm:num_requests_waiting": {"a": 1}}).error
    assert refused["message"] == "vllm:num_requests_waiting: there is no engine a; give one of 0"
    for wrong in (-1, {}, {"00": 1}, {"0": -1}):
        assert server.ask("PUT", "/admin/metrics", {"vllm:num_requests_waiting": wrong}).status == 400
    assert server.ask("GET", "/admin/metrics").document == given
    assert server.ask("PUT", "/admin/metrics", {}).document == {}
    assert metric(server, "vllm:num_requests_waiting") == 0
