"""Requests that any server of OpenAI's API may get, as a table: vLLM's answer to each is the norm.

A case names what differs on purpose. Each name has its row in docs/serving-api.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Look up the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Case(NamedTuple):
    """A request, and the names of the documented differences that its answer shows."""

    name: str
    path: str
    body: dict[str, Any] | bytes | None
    differs: tuple[str, ...] = ()
    method: str = "POST"
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "application/json"),)


def completion(name: str, *differs: str, **body: Any) -> Case:
    """Return a greedy completion request; a value of ... leaves a default out."""
    defaults = {"model": "m", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    return Case(f"completion: {name}", COMPLETIONS, _given({**defaults, **body}), differs)


def chat(name: str, *differs: str, **body: Any) -> Case:
    """Return a greedy chat request."""
    messages = [{"role": "user", "content": "Name a colour."}]
    defaults = {"model": "m", "messages": messages, "max_tokens": 8, "temperature": 0}
    return Case(f"chat: {name}", CHAT, _given({**defaults, **body}), differs)


def _given(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not ...}


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


METRICS = "metrics"  # the difference that no case shows, but a scrape

USAGE = {"stream": True, "stream_options": {"include_usage": True}}

CASES: list[Case] = [
    # Plain answers
    completion("text"),
    completion("token ids", prompt=[504, 1055, 253, 655]),
    completion("one token id", prompt=[504]),
    completion("several prompts", prompt=["Once upon", "The sky"]),
    completion("several prompts of token ids", prompt=[[504, 1055], [504, 2905]]),
    completion("no length stated", max_tokens=...),
    completion("no model stated", model=...),
    completion("one token", max_tokens=1),
    completion("a temperature of nothing but a seed", seed=7),
    completion("top_k and top_p that are greedy", top_k=1, top_p=0.5),
    completion("unicode", prompt="Les élèves où ça – 日本"),
    completion("an emoji, which is several tokens", prompt="🙂🙃", max_tokens=12),
    completion("a special token in the text", prompt="<|im_start|>user\nHi<|im_end|>\n"),
    completion("return_token_ids", return_token_ids=True),
    completion("user", user="somebody"),
    completion("priority 0", priority=0),
    completion("n 1 stated", n=1),
    completion("n of 2", "named fields", n=2),
    completion("best_of 1", best_of=1),
    completion("echo", echo=True),
    completion("echo with logprobs", echo=True, logprobs=1),
    completion("echo alone", echo=True, max_tokens=0, logprobs=1),
    completion("echo alone without logprobs", echo=True, max_tokens=0),
    completion("n of 2, which are alike", n=2, temperature=1, top_k=1, seed=1),
    completion("n of 2 for each of two prompts", n=2, temperature=1, top_k=1, prompt=["Once upon", "The sky"]),
    completion("suffix that is empty", suffix=""),
    completion("suffix", suffix="the end"),
    completion("presence penalty", presence_penalty=0.7),
    completion("frequency penalty", frequency_penalty=0.7),
    completion("repetition penalty", repetition_penalty=1.3),
    completion("logit bias", logit_bias={"28": -100}),
    completion("bad words", bad_words=["the"]),
    completion("penalties together", presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.2,
               max_tokens=40),
    completion("bad words of several tokens", bad_words=["Nova Haven", "the city"], max_tokens=24),
    completion("penalties with logprobs", repetition_penalty=1.3, logprobs=2),
    completion("allowed tokens", allowed_token_ids=[28, 253, 260]),
    completion("min_p", min_p=0.1),
    completion("truncated prompt", prompt="one two three four five six seven", truncate_prompt_tokens=3),
    completion("a prompt truncated to its beginning", prompt="one two three four five six seven",
               truncate_prompt_tokens=3, truncation_side="right"),
    completion("add_special_tokens false", add_special_tokens=False),
    completion("skip_special_tokens false", skip_special_tokens=False),
    completion("spaces_between_special_tokens false", spaces_between_special_tokens=False),
    completion("prompt_logprobs", prompt_logprobs=1),
    completion("logprobs 0", logprobs=0),
    completion("logprobs 1", logprobs=1),
    completion("logprobs 3", logprobs=3),
    completion("return_tokens_as_token_ids", logprobs=1, return_tokens_as_token_ids=True),
    # Where it ends
    completion("a stop string", stop="."),
    completion("stop strings", stop=[",", "."], max_tokens=40),
    completion("a stop string that stays", stop=[","], include_stop_str_in_output=True, max_tokens=40),
    completion("a stop string over tokens", stop=["there was"], max_tokens=24),
    completion("a stop token", stop_token_ids=[28], max_tokens=40),
    completion("a stop token that stays", stop_token_ids=[28], include_stop_str_in_output=True, max_tokens=40),
    completion("min_tokens before a stop token", stop_token_ids=[28], min_tokens=6, max_tokens=24),
    completion("no stop strings", stop=[]),
    completion("ignore_eos", ignore_eos=True, max_tokens=24),
    completion("min_tokens beyond a stop string", stop=[","], min_tokens=12, max_tokens=24),
    completion("min_tokens", min_tokens=6, max_tokens=12),
    # Streams
    completion("stream", stream=True),
    completion("stream with usage", **USAGE),
    completion("stream with usage in each chunk", stream=True,
               stream_options={"include_usage": True, "continuous_usage_stats": True}),
    completion("stream with logprobs", stream=True, logprobs=1),
    completion("stream of token ids", stream=True, return_token_ids=True),
    completion("stream with a stop string", stream=True, stop=[","], max_tokens=40),
    completion("stream of several prompts", stream=True, prompt=["Once upon", "The sky"]),
    completion("stream of n", "named fields", stream=True, n=2),
    completion("stream of n, which are alike", stream=True, n=2, temperature=1, top_k=1),
    completion("stream with top logprobs", stream=True, logprobs=3),
    completion("stream with echo", stream=True, echo=True),
    completion("stream options of no stream", stream_options={"include_usage": True}),
    # Chats
    chat("text"),
    chat("parts", messages=user([{"type": "text", "text": "Name a"}, {"type": "text", "text": "colour."}])),
    chat("a system message", messages=[{"role": "system", "content": "Be brief."}, *user("Hi")]),
    chat("a conversation", messages=[*user("Hi"), {"role": "assistant", "content": "Hello."}, *user("Bye")]),
    chat("an assistant to be continued", messages=[*user("Count"), {"role": "assistant", "content": "1, 2,"}],
         continue_final_message=True, add_generation_prompt=False),
    chat("no generation prompt", add_generation_prompt=False),
    chat("a name", messages=[{"role": "user", "name": "ann", "content": "Hi"}]),
    chat("a developer message", messages=[{"role": "developer", "content": "Be brief."}, *user("Hi")]),
    chat("max_completion_tokens", max_tokens=..., max_completion_tokens=5),
    chat("both lengths", max_completion_tokens=5),
    chat("logprobs", logprobs=True),
    chat("top_logprobs", logprobs=True, top_logprobs=2),
    chat("return_token_ids", return_token_ids=True),
    chat("n of 2, which are alike", n=2, temperature=1, top_k=1),
    chat("top_logprobs alone", top_logprobs=2),
    chat("n of 2", "named fields", n=2),
    chat("stop", stop=["."], max_tokens=40),
    chat("a seed", seed=3),
    chat("stream", stream=True),
    chat("stream with usage", **USAGE),
    chat("stream with logprobs", stream=True, logprobs=True),
    chat("stream of token ids", stream=True, return_token_ids=True),
    chat("stream of n, which are alike", stream=True, n=2, temperature=1, top_k=1),
    chat("stream of n", "named fields", stream=True, n=2),
    chat("tools that need not be called", tools=[TOOL], tool_choice="none"),
    chat("tools to be chosen", "tools", tools=[TOOL]),
    chat("a tool by name", "tools", tools=[TOOL], tool_choice={"type": "function", "function": {"name": "weather"}},
         max_tokens=40),
    chat("a tool that is required", "tools", tools=[TOOL], tool_choice="required", max_tokens=60),
    chat("a tool's answer", messages=[
        *user("Weather?"),
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
    ]),
    chat("response_format text", response_format={"type": "text"}),
    chat("a JSON schema", "structured outputs", max_tokens=40,
         response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}),
    chat("a JSON object", "structured outputs", response_format={"type": "json_object"}, max_tokens=12),
    completion("structured outputs by schema", "structured outputs", max_tokens=40,
               structured_outputs={"json": SCHEMA}),
    completion("structured outputs by regex", "structured outputs", structured_outputs={"regex": "[a-c]{3}"}),
    completion("structured outputs by choice", "structured outputs", structured_outputs={"choice": ["red", "blue"]}),
    chat("chat_template_kwargs", chat_template_kwargs={"some": "thing"}),
    chat("reasoning effort", reasoning_effort="low"),
    chat("store", store=False),
    chat("metadata", metadata={"a": "b"}),
    chat("service tier", service_tier="auto"),
    chat("parallel_tool_calls", parallel_tool_calls=True),
    chat("safety identifier", safety_identifier="x"),
    # What nobody can answer
    completion("no prompt", prompt=...),
    completion("an empty prompt", prompt=""),
    completion("an empty list of tokens", "named fields", prompt=[]),
    completion("a token that is not there", "named fields", prompt=[10**6]),
    completion("a negative token", prompt=[-1]),
    completion("another model", model="gpt-5"),
    completion("a prompt that is too long", "named fields", prompt=[504] * 3000),
    completion("more tokens than fit", max_tokens=100_000),
    completion("no tokens", max_tokens=0),
    completion("a negative length", max_tokens=-1),
    completion("a length that is text", "strict types", max_tokens="8"),
    completion("a length that is a fraction", max_tokens=8.5),
    completion("a negative temperature", temperature=-1),
    completion("a high temperature with a seed", temperature=3, max_tokens=1, top_k=1),
    completion("top_p 0", top_p=0),
    completion("top_p beyond 1", top_p=1.5),
    completion("top_k -2", "named fields", top_k=-2),
    completion("top_k -1", top_k=-1),
    completion("n 0", "named fields", n=0),
    completion("min_tokens beyond max_tokens", "named fields", min_tokens=9),
    completion("logprobs beyond the most", logprobs=100),
    completion("negative logprobs", logprobs=-1),
    completion("a penalty out of range", "named fields", presence_penalty=3),
    completion("a field that nobody knows", "unknown fields", colour="red"),
    completion("an empty stop string", "named fields", stop=""),
    completion("a stop that is a number", stop=3),
    completion("a regex that is none", "named fields", structured_outputs={"regex": "("}),
    completion("a schema that is none", "named fields", structured_outputs={"json": {"type": "nothing"}}),
    completion("a grammar twice", structured_outputs={"json": SCHEMA, "regex": "a"}),
    completion("stream that is text", "strict types", stream="yes"),
    completion("seed that is text", seed="x"),
    chat("no messages", messages=...),
    chat("an empty list of messages", "named fields", messages=[]),
    chat("a message without a role", "named fields", messages=[{"content": "Hi"}]),
    chat("a role that nobody has", messages=[{"role": "robot", "content": "Hi"}]),
    chat("a message without content", messages=[{"role": "user"}]),
    chat("a message of nothing", messages=user("")),
    chat("an image", "content parts",
         messages=user([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}])),
    chat("a part of an unknown type", "content parts", messages=user([{"type": "smell", "smell": "rose"}])),
    chat("a tool that is not there", tools=[TOOL], tool_choice={"type": "function", "function": {"name": "x"}}),
    chat("a tool choice without tools", tool_choice="required"),
    chat("top_logprobs beyond the most", "named fields", logprobs=True, top_logprobs=100),
    chat("a response format of an unknown type", response_format={"type": "xml"}),
    chat("a JSON schema without a schema", response_format={"type": "json_schema"}),
    Case("a body that is no JSON", COMPLETIONS, b"{", differs=("invalid JSON",)),
    Case("a body of nothing", COMPLETIONS, b""),
    Case("a body that is a list", COMPLETIONS, b"[]"),
    Case("a body of another type", COMPLETIONS, b'{"prompt":"a"}', headers=(("Content-Type", "text/plain"),)),
    Case("a path that is not there", "/v1/nothing", {}, differs=("unknown paths",)),
    Case("a method that is not there", COMPLETIONS, None, method="GET", differs=("unknown paths",)),
    # Beside the answers
    Case("models", "/v1/models", None, method="GET"),
    Case("health", "/health", None, method="GET"),
    Case("ping", "/ping", None, method="GET"),
    Case("version", "/version", None, method="GET", differs=("version",)),
    Case("tokenize text", "/tokenize", {"model": "m", "prompt": "Once upon a time"}),
    Case("tokenize without special tokens", "/tokenize", {"model": "m", "prompt": "Hi", "add_special_tokens": False}),
    Case("tokenize with strings", "/tokenize", {"model": "m", "prompt": "Once upon", "return_token_strs": True}),
    Case("tokenize a chat", "/tokenize", {"model": "m", "messages": user("Hi")}),
    Case("tokenize a chat alone", "/tokenize", {"messages": user("Hi"), "add_generation_prompt": False}),
    Case("tokenize nothing", "/tokenize", {"model": "m"}),
    Case("tokenize for another model", "/tokenize", {"model": "x", "prompt": "Hi"}),
    Case("detokenize", "/detokenize", {"model": "m", "tokens": [504, 1055, 253, 655]}),
    Case("detokenize nothing", "/detokenize", {"model": "m", "tokens": []}),
    Case("detokenize what is no token", "/detokenize", {"model": "m", "tokens": ["a"]}),
]  # fmt: skip
