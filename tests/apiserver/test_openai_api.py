"""The server's answers: every endpoint, whole and as a stream, compared with the twin that it serves."""

import asyncio
import json
from http.client import HTTPException
from time import monotonic

import pytest

from tests.apiserver.served import TWIN, serving
from tokentwin.apiserver.messages import Add, Output
from tokentwin.apiserver.openai_api.delivery import at_intervals
from tokentwin.apiserver.openai_api.structured import schema_in
from tokentwin.apiserver.twin import AnswerLengths

WORDS = [{"role": "user", "content": "Hello"}]
MORE = ("--enable-prompt-tokens-details",)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("twin"), *TWIN, "--speed", 100, "--output-tokens", 9, *MORE) as server:
        yield server


def words_of(server, **body):
    """Return the text of an answer and the words of its tokens; equal seeds give equal words."""
    answered = server.complete(ignore_eos=True, logprobs=0, **body)
    return answered.choice["text"], answered.choice["logprobs"]["tokens"]


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready", "/metrics", "/version", "/v1/models"])
def test_what_operators_look_at(server, path):
    assert server.ask("GET", path).status == 200


def test_the_model_is_listed_as_it_is_answered(server):
    (model,) = server.ask("GET", "/v1/models").document["data"]
    assert model["object"] == "model" and model["max_model_len"] > 1000
    assert server.complete(model=model["id"]).document["model"] == model["id"]
    refused = server.complete(model="another")
    assert refused.status == 404 and refused.error["param"] == "model"


def test_a_text_or_its_tokens_are_continued_alike(server):
    tokens = server.ask("POST", "/tokenize", {"prompt": "Hello there"}).document
    assert tokens["count"] == len(tokens["tokens"])
    for prompt in ("Hello there", tokens["tokens"]):
        document = server.complete(prompt=prompt, max_tokens=7).document
        assert document["object"] == "text_completion" and document["id"].startswith("cmpl-")
        assert document["usage"]["prompt_tokens"] == tokens["count"]
        assert document["usage"]["completion_tokens"] == 7
    assert document["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("ask", ["complete", "chat"])
def test_a_stream_says_what_a_whole_answer_says(server, ask):
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    asked = {"max_tokens": 12, "seed": 5, "ignore_eos": True}
    whole, *events = [getattr(server, ask)(**asked).document, *getattr(server, ask)(**asked, **usage).events]
    *pieces, last = events
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert len({event["id"] for event in events}) == 1
    choices = [piece["choices"][0] for piece in pieces]
    if ask == "chat":
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        assert len(text.split()) == len(whole["choices"][0]["message"]["content"].split())
    else:
        text = "".join(choice["text"] for choice in choices)
        assert len(text.split()) == len(whole["choices"][0]["text"].split())
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"] == "length"
    without = getattr(server, ask)(**asked, stream=True).events
    assert all(event["choices"] and "usage" not in event for event in without)


@pytest.mark.parametrize("sizes, merged", [([1] * 12, [1, 5, 5, 1]), ([0, 3, 1, 1, 9, 1], [3, 11, 1]), ([2], [2])])
def test_a_stream_has_its_first_token_at_once_and_then_as_many_as_were_asked_for(sizes, merged):
    async def outputs():
        for left, size in zip(range(len(sizes))[::-1], sizes, strict=True):
            yield Output(1, list(range(size)), finish="" if left else "length")

    async def counts():
        return [len(output.tokens) async for output in at_intervals(outputs(), 5)]

    assert asyncio.run(counts()) == merged


def test_usage_so_far_is_in_every_chunk_if_asked_for(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.complete(max_tokens=5, stream=True, stream_options=options).events
    assert events[-1]["usage"]["completion_tokens"] == events[-2]["usage"]["completion_tokens"] == 5
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[0] >= 1


@pytest.mark.parametrize("ask", ["complete", "chat"])
def test_a_stream_has_the_token_ids_that_a_whole_answer_has(server, ask):
    asked = {"max_tokens": 12, "seed": 5, "ignore_eos": True, "return_token_ids": True}
    whole = getattr(server, ask)(**asked).choice["token_ids"]
    choices = [event["choices"][0] for event in getattr(server, ask)(**asked, stream=True).events]
    assert [token for choice in choices for token in choice.get("token_ids", [])] == whole and len(whole) == 12


def test_a_chat_is_one_message(server):
    choice = server.chat(max_tokens=3).choice
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"]
    assert choice["index"] == 0 and choice["logprobs"] is None


def test_tools_and_parts_are_in_the_prompt(server):
    plain = server.chat().document["usage"]["prompt_tokens"]
    assert server.chat(tools=[TOOL]).document["usage"]["prompt_tokens"] > plain
    lines = [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}]
    joined = [{"role": "user", "content": "Hel\nlo"}]
    tokens = [server.ask("POST", "/tokenize", {"messages": said}).document["tokens"] for said in (lines, joined)]
    assert tokens[0] == tokens[1]
    counted = server.ask("POST", "/tokenize", {"messages": WORDS}).document["count"]
    assert counted == plain


def test_how_long_an_answer_is(server):
    def tokens(ask, **body):
        return ask(**body).document["usage"]["completion_tokens"]

    assert tokens(server.complete, max_tokens=50) == 9  # as was said to be drawn
    assert tokens(server.complete, max_tokens=5) == 5
    assert tokens(server.complete, max_tokens=50, min_tokens=20) == 20
    assert tokens(server.complete, max_tokens=50, ignore_eos=True) == 50
    assert tokens(server.complete, max_tokens=None, ignore_eos=True) == 16
    assert tokens(server.chat, max_tokens=None, max_completion_tokens=6) == 6
    assert tokens(server.chat, max_tokens=3, max_completion_tokens=6) == 6
    assert server.complete(max_tokens=50).choice["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_an_answer_across_tokens(server, stream):
    asked = {"max_tokens": 12, "seed": 1}
    text, words = words_of(server, **asked)
    for stop in (words[4], words[4][2:] + words[5][:3], words[9] + words[10]):
        answered = server.complete(**asked, ignore_eos=True, stop=["never to be seen", stop], stream=stream)
        choices = [event["choices"][0] for event in answered.events] if stream else [answered.choice]
        assert "".join(choice["text"] for choice in choices) == text[: text.index(stop)]
        assert choices[-1]["finish_reason"] == "stop"


def test_tokens_up_to_a_stop_string_are_used(server):
    _, words = words_of(server, max_tokens=12, seed=1)
    stop = words[4][2:] + words[5][:3]
    usage = server.complete(max_tokens=12, seed=1, ignore_eos=True, stop=stop).document["usage"]
    assert usage["completion_tokens"] == 6


def test_logprobs_are_of_the_tokens_of_the_text(server):
    choice = server.complete(logprobs=1, max_tokens=5).choice
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"] and logprobs["token_logprobs"] == [0.0] * 5
    assert [choice["text"][at:][:4] for at in logprobs["text_offset"]] == [word[:4] for word in logprobs["tokens"]]
    content = server.chat(logprobs=True, max_tokens=5).choice["logprobs"]["content"]
    assert [token["logprob"] for token in content] == [0.0] * 5
    assert all(bytes(token["bytes"]).decode() == token["token"] for token in content)
    events = server.chat(logprobs=True, max_tokens=5, stream=True).events[1:]
    assert sum(len(event["choices"][0]["logprobs"]["content"]) for event in events) == 5


@pytest.mark.parametrize(
    "field, value",
    [
        ("n", 0), ("best_of", 0), ("suffix", "x"), ("logit_bias", {"a": 1}), ("logit_bias", {"999999": 1}),
        ("presence_penalty", 3), ("frequency_penalty", "much"), ("repetition_penalty", 0), ("logprobs", 21),
        ("prompt_logprobs", -1), ("anything", 1), ("prompt", ["a", 5]), ("prompt", [[5], []]), ("temperature", -1),
        ("seed", 10**20), ("stop", [""]), ("stop_token_ids", ["a"]), ("min_tokens", 5), ("priority", "high"),
        ("response_format", {"type": "xml"}), ("structured_outputs", {"regex": "a", "json": {}}),
        ("structured_outputs", {"choice": []}), ("stream_options", {"include_usage": True}), ("max_tokens", 0),
        ("allowed_token_ids", []), ("min_p", 2), ("truncate_prompt_tokens", -2),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(server, field, value):
    refused = server.complete(**{field: value})
    assert refused.status == 400 and refused.error["param"].removeprefix("body.").split(".")[0] == field
    assert field in refused.error["message"]


@pytest.mark.parametrize(
    "field, value", [("top_logprobs", 2), ("tool_choice", "required"), ("echo", True), ("continue_final_message", True)]
)
def test_what_chats_do_not_support_is_refused_by_name(server, field, value):
    refused = server.chat(**{field: value})
    assert refused.status == 400 and refused.error["param"] == field


@pytest.mark.parametrize(
    "body, kind, param",
    [
        ({"prompt": "a", "top_p": 2}, "BadRequestError", "top_p"),
        ({"prompt": "a", "top_p": "b"}, "Bad Request", "body.top_p"),
        ({"prompt": [-1]}, "Bad Request", "body.prompt.0"),
        ([], "Bad Request", "body"),
    ],
)
def test_a_wrong_value_and_a_wrong_shape_are_told_apart_as_vllm_does(server, body, kind, param):
    refused = server.ask("POST", "/v1/completions", body)
    assert (refused.status, refused.error["type"], refused.error["param"]) == (400, kind, param)


def test_other_errors_have_vllms_types(server):
    assert server.complete(model="x").error["type"] == "NotFoundError"
    other = server.ask("POST", "/v1/completions", b'{"prompt": "a"}', Content_Type="text/plain")
    assert (other.status, other.error["type"]) == (400, "Bad Request") and "application/json" in other.error["message"]


def test_a_grammar_is_taken_and_what_cannot_be_kept_to_is_refused(server):
    schema = {"name": "any", "schema": {"type": "object"}, "strict": True}
    assert server.chat(response_format={"type": "json_schema", "json_schema": schema}).status == 200
    assert server.complete(structured_outputs={"regex": "[a-z]+"}).status == 200
    refused = server.complete(structured_outputs={"regex": "(a"})
    assert refused.status == 400 and "unclosed group" in refused.error["message"]


@pytest.mark.parametrize(
    "body, param, message",
    [
        ({"prompt": 5}, "body.prompt", "prompt must be a string or a list"),
        ({"prompt": [1, "a"]}, "body.prompt.1", "prompt.1 must be a whole number"),
        ({"prompt": []}, "prompt", "prompt must not be empty"),
        ({"prompt": "a", "stream": "yes"}, "body.stream", "stream must be true or false"),
        ({"prompt": "a", "top_p": 2}, "top_p", "top_p must be at most 1.0"),
        ({}, "prompt", "prompt is missing; add it"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(server, body, param, message):
    error = server.ask("POST", "/v1/completions", body).error
    assert (error["param"], error["message"]) == (param, message)


def test_what_changes_nothing_is_taken(server):
    assert server.complete(n=1, echo=False, logit_bias={}, priority=-3, user="a", top_k=-1, top_p=1).status == 200
    more = {"metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": False}
    assert server.chat(**more, safety_identifier="x", reasoning_effort="low", repetition_penalty=1.0).status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_several_answers_are_choices_in_order(server, stream):
    asked = {"max_tokens": 5, "ignore_eos": True, "return_token_ids": True}
    prompts = ["Hello", "Good day to you"]
    alone = [server.complete(prompt=prompt, seed=seed, **asked).choice for prompt in prompts for seed in (7, 8)]
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    answered = server.complete(prompt=prompts, n=2, seed=7, stream=stream, **asked, **usage)
    if not stream:
        choices, used = answered.document["choices"], answered.document["usage"]
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    else:
        *pieces, last = answered.events
        used, choices = last["usage"], [{"text": "", "token_ids": []} for _ in range(4)]
        for piece in (piece["choices"][0] for piece in pieces):
            choices[piece["index"]]["text"] += piece["text"]
            choices[piece["index"]]["token_ids"] += piece["token_ids"]
            choices[piece["index"]].setdefault("prompt_token_ids", piece.get("prompt_token_ids"))
    for name in ("text", "token_ids", "prompt_token_ids"):
        assert [choice[name] for choice in choices] == [choice[name] for choice in alone]
    lengths = [len(choice["prompt_token_ids"]) for choice in choices]
    assert (used["prompt_tokens"], used["completion_tokens"]) == (lengths[0] + lengths[2], 20)


def test_streams_of_several_chats_say_who_speaks_in_each(server):
    events = server.chat(n=3, max_tokens=2, stream=True, ignore_eos=True).events
    first = [event["choices"][0] for event in events[:3]]
    assert [(choice["index"], choice["delta"]) for choice in first] == [
        (index, {"role": "assistant", "content": ""}) for index in range(3)
    ]
    assert [event["choices"][0]["finish_reason"] for event in events].count("length") == 3


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_may_begin_with_its_prompt(server, stream):
    asked = {"max_tokens": 3, "seed": 1, "stream": stream, "ignore_eos": True}

    def text(**more):
        answered = server.complete(**asked, **more)
        choices = [event["choices"][0] for event in answered.events] if stream else [answered.choice]
        return "".join(choice["text"] for choice in choices)

    assert text(echo=True) == "Hello" + text()
    assert server.complete(echo=True, max_tokens=0).choice["text"] == "Hello"


def test_a_stop_string_may_stay_and_is_named(server):
    _, words = words_of(server, max_tokens=12, seed=1)
    asked = {"max_tokens": 12, "seed": 1, "ignore_eos": True, "stop": ["nowhere", words[3]]}
    stops = server.complete(**asked).choice
    keeps = server.complete(**asked, include_stop_str_in_output=True).choice
    assert stops["stop_reason"] == keeps["stop_reason"] == words[3]
    assert keeps["text"] == stops["text"] + words[3] == "".join(words[:4])
    later = server.complete(**asked, min_tokens=8).choice
    assert later["text"].startswith("".join(words[:8])) and server.complete().choice["stop_reason"] is None


def test_a_model_is_found_by_its_name(server):
    (model,) = server.ask("GET", "/v1/models").document["data"]
    assert server.ask("GET", f"/v1/models/{model['id']}").document == model
    assert server.ask("GET", "/v1/models/some/other").status == 404


def test_the_best_answers_of_several(server):
    answered = server.complete(best_of=3, n=2, max_tokens=4, ignore_eos=True).document
    assert [choice["index"] for choice in answered["choices"]] == [0, 1]
    assert answered["usage"]["completion_tokens"] == 12 and answered["choices"][0]["logprobs"] is None
    greedy = server.complete(best_of=2, temperature=0)
    many = server.complete(best_of=128, prompt=["a"] * 90)
    for refused in (server.complete(best_of=1, n=2), server.complete(best_of=2, stream=True), greedy, many):
        assert refused.status == 400 and refused.error["param"] == "best_of"


@pytest.mark.parametrize("ask", ["complete", "chat"])
def test_a_prompt_has_logprobs_after_its_first_token(server, ask):
    document = getattr(server, ask)(prompt_logprobs=0, return_token_ids=True).document
    holder = document["choices"][0] if ask == "complete" else document
    first, *scores = holder["prompt_logprobs"]
    assert first is None and [int(token) for (token,) in scores] == holder["prompt_token_ids"][1:]
    refused = getattr(server, ask)(prompt_logprobs=0, stream=True)
    assert refused.status == 400 and refused.error["param"] == "prompt_logprobs"


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_has_the_logprobs_of_the_prompt(server, stream):
    asked = {"prompt": [5, 6, 7], "echo": True, "logprobs": 0, "max_tokens": 2, "stream": stream}
    answered = server.complete(**asked)
    pieces = [event["choices"][0] for event in answered.events] if stream else [answered.choice]
    logprobs = [piece["logprobs"]["token_logprobs"] for piece in pieces if piece["logprobs"]]
    assert [one for piece in logprobs for one in piece] == [None, 0.0, 0.0, 0.0, 0.0]
    assert len(server.complete(**{**asked, "stream": False, "max_tokens": 0}).choice["logprobs"]["tokens"]) == 3


def test_cached_tokens_of_the_prompt_are_counted(server):
    asked = {"prompt": list(range(500, 600)), "max_tokens": 1}
    used = [server.complete(**asked, **more).document["usage"] for more in ({}, {}, {"prompt_logprobs": 0})]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in used]
    assert cached == [0, 96, 0]  # logprobs need the whole prompt to be computed


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


@pytest.mark.parametrize("stream", [False, True])
def test_a_twins_structured_answer_follows_its_schema(server, stream):
    pytest.importorskip("llguidance")
    asked = {"max_tokens": 100, "temperature": 0, "structured_outputs": {"json": SCHEMA}}
    first, again = server.chat(**asked).choice, server.chat(**asked, stream=stream)
    content = first["message"]["content"]
    assert list(json.loads(content)) == ["n"] and first["finish_reason"] == "stop"
    if stream:
        said = "".join(event["choices"][0]["delta"].get("content", "") for event in again.events)
        assert said == content
    assert server.chat(**{**asked, "max_tokens": 2}).choice["finish_reason"] == "length"
    assert server.complete(structured_outputs={"choice": ["yes", "no"]}, max_tokens=9).choice["text"] in ("yes", "no")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_a_twin_calls_a_tool_that_it_must_call(server, choice):
    pytest.importorskip("llguidance")
    answered = server.chat(tools=[TOOL], tool_choice=choice, max_tokens=400, temperature=0).choice
    assert {call["function"]["name"] for call in answered["message"]["tool_calls"]} == {"look"}
    assert all(isinstance(json.loads(c["function"]["arguments"]), dict) for c in answered["message"]["tool_calls"])


FLAT = {"type": "function", "name": "look", "parameters": SCHEMA}


def test_responses_are_chats_in_another_form(server):
    whole = server.ask("POST", "/v1/responses", {"input": "Hello", "max_output_tokens": 5}).document
    chat = server.chat(max_tokens=5).document["usage"]
    assert whole["usage"]["input_tokens"] == chat["prompt_tokens"] and whole["status"] == "incomplete"
    (message,) = whole["output"]
    assert message["content"][0]["text"].strip()
    body = {"input": "Hello", "max_output_tokens": 300, "tools": [FLAT], "tool_choice": "required", "temperature": 0}
    (call, *_) = server.ask("POST", "/v1/responses", body).document["output"]
    items = [{"role": "user", "content": "Hello"}, call, {**RESULT, "call_id": call["call_id"]}]
    assert server.ask("POST", "/v1/responses", {"input": items, "max_output_tokens": 5}).status == 200
    refused = server.ask("POST", "/v1/responses", {"input": "a", "max_output_tokens": 2**40})
    assert refused.status == 400 and refused.error["param"] == "max_output_tokens"


RESULT = {"type": "function_call_output", "output": "rain"}


@pytest.mark.parametrize(
    "path, body, text, arguments",
    [
        (
            "/v1/responses",
            {"input": "Hello", "max_output_tokens": 300, "tools": [FLAT]},
            ("response.output_text.delta", lambda event: event["delta"]),
            ("response.function_call_arguments.delta", lambda event: event["delta"]),
        ),
        (
            "/v1/messages",
            {"messages": WORDS, "max_tokens": 300, "tools": [{"name": "look", "input_schema": SCHEMA}]},
            ("content_block_delta", lambda event: event["delta"].get("text", "")),
            ("content_block_delta", lambda event: event["delta"].get("partial_json", "")),
        ),
    ],
)
def test_streams_of_blocks_have_the_text_or_the_arguments_of_calls(server, path, body, text, arguments):
    pytest.importorskip("llguidance")
    (model,) = server.ask("GET", "/v1/models").document["data"]
    for (kind, added), choice in ((text, None), (arguments, "required" if "input" in body else {"type": "any"})):
        chosen = {} if choice is None else {"tool_choice": choice}
        lines = server.ask("POST", path, {**body, **chosen, "model": model["id"], "stream": True}).body.decode()
        events = [json.loads(line[6:]) for line in lines.splitlines() if line.startswith("data: ")]
        said = "".join(added(event) for event in events if event["type"] == kind)
        assert said.strip() if choice is None else list(json.loads(said.split("}")[0] + "}")) == ["n"]
        end = events[-1]
        if "response" in end:
            assert end["type"] == f"response.{end['response']['status']}" and end["response"]["status"] != "in_progress"
        else:
            assert end["type"] == "message_stop"


def test_messages_are_chats_in_another_form(server):
    (model,) = server.ask("GET", "/v1/models").document["data"]
    body = {"model": model["id"], "messages": WORDS, "max_tokens": 5}
    whole = server.ask("POST", "/v1/messages", body).document
    assert whole["stop_reason"] == "max_tokens" and whole["content"][0]["text"].strip()
    counted = server.ask("POST", "/v1/messages/count_tokens", {"model": model["id"], "messages": WORDS}).document
    usage = whole["usage"]
    assert counted["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
    long = {**body, "messages": [{"role": "user", "content": "Hello " * 200}]}
    usages = [server.ask("POST", "/v1/messages", long).document["usage"] for _ in range(2)]
    assert usages[1]["cache_read_input_tokens"] > 0
    assert len({usage["input_tokens"] + usage["cache_read_input_tokens"] for usage in usages}) == 1
    refused = server.ask("POST", "/v1/messages", {**body, "stop_sequences": [""]})
    assert refused.status == 400 and "stop_sequences" in refused.document["error"]["message"]
    refused = server.ask("POST", "/v1/messages", {**body, "model": "x"})
    assert refused.status == 404 and refused.document["error"]["type"] == "not_found_error"


def test_the_arguments_of_a_call_may_be_nested_deeply(server):
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "[" * 100_000}}
    messages = [*WORDS, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "rain"}]
    assert server.chat(messages=messages).status == 200


def test_a_prompt_is_cut_to_what_is_asked_for(server):
    def prompt(**more):
        return server.complete(prompt=[5, 6, 7, 8], return_token_ids=True, **more).choice["prompt_token_ids"]

    assert prompt() == [5, 6, 7, 8]
    assert prompt(truncate_prompt_tokens=3) == [6, 7, 8]
    assert prompt(truncate_prompt_tokens=3, truncation_side="right") == [5, 6, 7]
    assert server.chat(return_token_ids=True).document["prompt_token_ids"]


def test_tokens_have_names_and_become_text_again(server):
    known = server.ask("POST", "/tokenize", {"prompt": " bada bade", "return_token_strs": True}).document
    assert known["token_strs"] == [" bada", " bade"]
    assert server.ask("POST", "/detokenize", {"tokens": known["tokens"]}).document == {"prompt": " bada bade"}
    assert server.ask("POST", "/detokenize", {"tokens": [10**8]}).error["param"] == "tokens"
    asks, ends = [
        server.ask("POST", "/tokenize", {"messages": WORDS, "add_generation_prompt": asks}).document["tokens"]
        for asks in (True, False)
    ]
    assert asks[: len(ends) - 1] == ends[:-1] and len(asks) > len(ends)
    assert server.ask("POST", "/tokenize", {}).error["param"] == "body.prompt"
    assert server.ask("POST", "/tokenize", {"prompt": "messages"}).status == 200


def test_a_prompt_that_does_not_fit_is_refused(server):
    most = server.ask("GET", "/v1/models").document["data"][0]["max_model_len"]
    assert server.complete(prompt=[5] * most).error["param"] == "prompt"
    assert server.complete(prompt=[5] * 10, max_tokens=most).error["param"] == "max_tokens"
    assert server.complete(prompt=[2**30]).error["param"] == "prompt"
    assert server.complete(prompt=[5] * most, truncate_prompt_tokens=-1).status == 200


def test_an_id_of_the_clients_is_repeated_if_it_is_fit(server):
    body = {"prompt": "Hello", "max_tokens": 1}
    assert server.ask("POST", "/v1/completions", body, X_Request_Id="mine-1").document["id"] == "mine-1"
    assert server.ask("POST", "/v1/completions", body, X_Request_Id="\x80\xff").document["id"].startswith("cmpl-")


@pytest.mark.parametrize("ask", ["complete", "chat"])
def test_nobody_gets_token_ids_unasked(server, ask):
    assert "token_ids" not in getattr(server, ask)().choice
    assert all(
        "token_ids" not in choice for event in getattr(server, ask)(stream=True).events for choice in event["choices"]
    )


def test_embeddings_have_length_1_and_one_for_each_input(server):
    asked = {"input": ["Hello", "Hello there", "Hello"]}
    document = server.ask("POST", "/v1/embeddings", asked).document
    assert document["object"] == "list" and [one["index"] for one in document["data"]] == [0, 1, 2]
    for one in document["data"]:
        assert sum(number * number for number in one["embedding"]) == pytest.approx(1)
    tokens = [server.ask("POST", "/tokenize", {"prompt": text}).document["count"] for text in asked["input"]]
    assert document["usage"] == {"prompt_tokens": sum(tokens), "total_tokens": sum(tokens)}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "body.input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [999_999]}, "input"),
        ({"input": "a", "dimensions": 4097}, "dimensions"),
        ({"input": "a", "encoding_format": "int"}, "body.encoding_format"),
        ({"input": "a", "model": "other"}, "model"),
        ({"input": ["a"] * 5000}, "input"),
    ],
)
def test_embeddings_that_cannot_be_made_are_refused_by_field(server, body, param):
    assert server.ask("POST", "/v1/embeddings", body).error["param"] == param


def test_fewer_dimensions_have_length_1_too(server):
    (one,) = server.ask("POST", "/v1/embeddings", {"input": "a", "dimensions": 8}).document["data"]
    assert len(one["embedding"]) == 8 and sum(number * number for number in one["embedding"]) == pytest.approx(1)


IGNORED = ({"detokenize": False}, {"include_reasoning": False}, {"vllm_xargs": {"a": 1}}, {"mm_processor_kwargs": {}})


@pytest.mark.parametrize("more", IGNORED, ids=str)
def test_what_vllm_ignores_changes_nothing(server, more):
    for ask in (server.complete, server.chat):
        asked = {"temperature": 0, "max_tokens": 5}
        assert ask(**asked, **more).document["choices"] == ask(**asked).document["choices"]


def test_prompts_share_cached_blocks_only_under_one_salt(server):
    def cached(**salt):
        usage = server.complete(prompt=[7, 9] * 40, max_tokens=1, **salt).document["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    salts = ("one", "one", "two", "two", None, None)
    assert [cached(**({"cache_salt": salt} if salt else {})) for salt in salts] == [0, 64, 0, 64, 0, 64]
    assert server.complete(cache_salt="").error["param"] == "cache_salt"


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
        {"guided_json": PERSON},
        {"guided_json": json.dumps(PERSON), "guided_regex": None},
    ],
    ids=lambda form: next(iter(form)),
)
def test_json_of_a_twin_follows_the_schema_that_its_prompt_describes(server, form):
    pytest.importorskip("llguidance")
    said = (
        f"Answer {{exactly}} with JSON of this schema:\n\n{json.dumps(PERSON, indent=2)}\n\nnot the {{schema}} itself"
    )
    chat = server.ask(
        "POST", "/v1/chat/completions", {"messages": [{"role": "system", "content": said}, *WORDS], **form}
    )
    for text in (chat.choice["message"]["content"], server.complete(prompt=said, max_tokens=90, **form).choice["text"]):
        person = json.loads(text)
        assert isinstance(person["name"], str) and isinstance(person["age"], int)


LOOK_LIKE_SCHEMAS = (
    {"type": "Feature", "properties": {"name": "Berlin"}},
    {"properties": {"name": "Berlin"}},
    {"properties": {"name": {"enum": ["a" * 300_000]}}},
)


@pytest.mark.parametrize("example", LOOK_LIKE_SCHEMAS, ids=lambda example: str(example)[:40])
def test_an_object_in_the_prompt_that_is_no_schema_does_not_matter(server, example):
    pytest.importorskip("llguidance")
    said = [{"role": "user", "content": f"Give JSON like {json.dumps(example)}"}]
    form = {"response_format": {"type": "json_object"}, "max_tokens": 90, "truncate_prompt_tokens": 100}
    chat = server.ask("POST", "/v1/chat/completions", {"messages": said, **form})
    assert isinstance(json.loads(chat.choice["message"]["content"]), dict)
    feature = json.dumps(LOOK_LIKE_SCHEMAS[0])
    assert schema_in(f"{json.dumps(PERSON)} for {feature}") == PERSON and schema_in(feature) is None


def test_a_constraint_in_two_spellings_is_refused(server):
    refused = server.chat(guided_regex="a", structured_outputs={"regex": "a"})
    assert "guided_regex" in refused.error["message"]


def test_responses_drop_the_beginning_of_a_conversation_that_is_too_long(server):
    asked = {"input": "bada " * 200_000, "max_output_tokens": 4}
    assert server.ask("POST", "/v1/responses", asked).status == 400
    answered = server.ask("POST", "/v1/responses", {**asked, "truncation": "auto"}).document
    assert answered["truncation"] == "auto" and answered["usage"]["total_tokens"] <= 131_072
    whole = {**asked, "max_output_tokens": 131_072, "truncation": "auto"}
    assert server.ask("POST", "/v1/responses", whole).error["param"] == "max_output_tokens"
    assert server.complete(max_tokens=131_073, truncate_prompt_tokens=-1).error["param"] == "max_tokens"


def test_the_vocabulary_is_the_models_own(server):
    beginning = 128_000  # Llama-3's token that begins a sequence; its vocabulary has 128,256 tokens
    assert server.complete(prompt=[beginning, 17]).status == 200
    assert "below 128256" in server.complete(prompt=[128_256]).error["message"]


@pytest.mark.parametrize("status", [401, 429, 500])
def test_a_client_asks_for_a_refusal(server, status):
    refused = server.ask("POST", "/v1/completions", {"prompt": "a"}, X_Twin_Failure=f"status={status}")
    assert refused.status == status and "X-Twin-Failure" in refused.error["message"]


def test_embeddings_can_be_refused_on_demand_and_fail_in_no_other_way(server):
    for header, status in (("status=503", 503), ("stall=2", 400), ("cut=1", 400), ("broken", 400)):
        refused = server.ask("POST", "/v1/embeddings", {"input": "a"}, X_Twin_Failure=header)
        assert refused.status == status and "X-Twin-Failure" in refused.error["message"]


@pytest.mark.parametrize("header", ["status=200", "status", "cut=0", "stall=-1", "stall=inf", "broken=1", "naught"])
def test_a_failure_that_is_none_is_refused_in_one_line(server, header):
    refused = server.ask("POST", "/v1/completions", {"prompt": "a"}, X_Twin_Failure=header)
    assert refused.status == 400 and "stall=2.5" in refused.error["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_asks_for_a_broken_connection(server, stream):
    asked = {"prompt": "a", "max_tokens": 9, "ignore_eos": True, "stream": stream}
    with pytest.raises(OSError):  # an incomplete read, or a reset
        try:
            server.ask("POST", "/v1/completions", asked, X_Twin_Failure="cut=4")
        except HTTPException as error:
            raise ConnectionError from error


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_asks_for_broken_documents(server, stream):
    asked = {"prompt": "a", "max_tokens": 9, "stream": stream}
    answered = server.ask("POST", "/v1/completions", asked, X_Twin_Failure="broken")
    lines = [line.removeprefix(b"data: ") for line in answered.body.split(b"\n\n") if line and b"[DONE]" not in line]
    assert answered.status == 200 and lines
    for line in lines:
        with pytest.raises(ValueError):
            json.loads(line)


def test_a_client_asks_for_a_stall(server):
    """The stall lies between the first and the second chunk, here with a margin for a first one that is read late."""
    asked = {"prompt": "a", "max_tokens": 5, "ignore_eos": True, "stream": True}
    connection = server.connect()
    try:
        headers = {"Content-Type": "application/json", "X-Twin-Failure": "stall=0.5"}
        connection.request("POST", "/v1/completions", json.dumps(asked), headers)
        response = connection.getresponse()
        came = [monotonic() for line in response if line.startswith(b"data: {")]
    finally:
        connection.close()
    assert len(came) >= 2 and came[1] - came[0] > 0.1


def test_failures_are_changed_while_the_twin_serves(server):
    planted = server.ask("PUT", "/admin/failures", {"refusals": [{"status": 502}], "seed": 3})
    try:
        assert planted.document == server.ask("GET", "/admin/failures").document
        assert planted.document["refusals"][0]["status"] == 502 and planted.document["seed"] == 3
        assert server.complete().status == 502
    finally:
        server.ask("PUT", "/admin/failures", {})
    assert server.complete().status == 200
    for wrong in ({"refusals": [{"replica": 1}]}, {"refusals": [{"share": 2}]}, {"crashes": []}):
        assert server.ask("PUT", "/admin/failures", wrong).status == 400


def test_a_chat_without_a_limit_gets_an_answer_of_usual_length():
    usual = AnswerLengths(None, lambda number: 100 + number % 7)
    chat = Add(1, [5], 100_000, 0, stop_ids=[0], temperature=1.0, open_ended=True)
    limited = Add(1, [5], 300, 0, stop_ids=[0], temperature=1.0)
    assert [usual.length(id, chat) for id in (0, 3)] == [100, 103]
    assert usual.length(3, limited) == 300
    assert AnswerLengths(lambda number: 9, lambda number: 100).length(3, chat) == 9


def test_the_prompt_decides_the_length_at_temperature_0_and_the_seed_at_any_other():
    lengths = AnswerLengths(lambda number: 1 + number % 997)
    asked = [Add(1, [5, 6], 1000, 0, stop_ids=[0], temperature=t, seed=seed) for t in (0.0, 1.0) for seed in (3, 4)]
    cold, cold_too, warm, warm_too = (lengths.length(7, one) for one in asked)
    assert cold == cold_too and (warm, warm_too) == (4, 5)
