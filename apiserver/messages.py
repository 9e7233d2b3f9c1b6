"""The messages between the API processes and the engine process, as MessagePack over ZeroMQ.

Every API process has a DEALER socket, and the engine process has one ROUTER socket. Each API process numbers its own
requests. All times are in ns on the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tokentwin.realengine.logit_rules import LogitRules, Logprob, PromptLogprob


class Message(msgspec.Struct, array_like=True, tag=True):
    """A message; its tag is the name of the class."""


class Hello(Message):
    """The first message of an API process, also after a reconnection; the engine process answers with `About`."""


class About(Message):
    """The served model: its name, the maximum number of tokens of a request, and the tokens that end an answer.

    Attributes:
        texts: folder of the tokenizer; empty if there is none
        twin: True for a twin, whose answers are filler words: every token is a complete text
        run: columns of the dataset `runs` that describe an engine, for the process that records several engines; else
            empty
        role: `serve`, or the part of a request that a gateway sends here: `prefill` or `decode`
        adapters: names of LoRA adapters that a request may give as its model
        embedding_size: number of elements of an embedding; 0 if the model is not known
        places: with `ports_per_replica`, index of the replica behind each port; -1 while there is none
    """

    model: str
    max_model_len: int
    stop_ids: list[int]
    texts: str
    vocab_size: int
    twin: bool
    block_size: int
    run: dict[str, Any] = {}
    places: list[int] = []
    role: str = "serve"
    adapters: list[str] = []
    embedding_size: int = 0

    @property
    def kv_tokens(self) -> int:
        return int(self.run["num_blocks"]) * self.block_size


class Add(Message):
    """A request, received over HTTP at `received_ns`; if `seed` is None, its id is the seed of its draws.

    With `max_tokens` 0 it is a pooling request, which wants the final hidden state of its last token.

    Attributes:
        stop_ids: the model's tokens that end an answer; empty to ignore them. `also_stop_ids` are further tokens that
            end this answer
        logprobs: number of alternatives returned with each output token; None if no log-probabilities are wanted
        prompt_logprobs: number of alternatives returned with each token of the prompt; None if they are not wanted
        place: place in the fleet of the replica at whose port the request came; None if a router chooses
        prefilled_at: server that has the KV of the prompt; empty if the prompt must be computed
        client_id: the client's name for the request; may be empty
        followed: True if the request is traced
        grammar: constraint on the answer, as `tokentwin.realengine.grammar` writes it; empty for any text
        rules: changes to the logits; None for no changes
        open_ended: True if the client gave no `max_tokens`, which is then the rest of the model's context
        answer: tokens with which a twin answers, one more than `max_tokens` if they are cut; empty for filler words
        adapter: LoRA adapter that answers; empty for the base model
        cache_salt: text that requests must share to share KV; empty for none
        operation: OpenTelemetry's name of the operation; `answer_id` is the name of the answer
        traceparent: the client's span, from the header of this name; `tracestate` is the vendors' part of it
    """

    id: int
    prompt: list[int]
    max_tokens: int
    received_ns: int
    min_tokens: int = 0
    stop_ids: list[int] = []
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    logprobs: int | None = None
    priority: int = 0
    tenant: str = ""
    session: str = ""
    place: int | None = None
    prefilled_at: str = ""
    client_id: str = ""
    operation: str = ""
    answer_id: str = ""
    followed: bool = False
    grammar: str = ""
    traceparent: str = ""
    tracestate: str = ""
    also_stop_ids: list[int] = []
    rules: LogitRules | None = None
    adapter: str = ""
    answer: list[int] = []
    prompt_logprobs: int | None = None
    open_ended: bool = False
    cache_salt: str = ""


GRAMMAR_FAILED = "the grammar of the answer gave up; simplify the schema or the expression"
"""Reason of an answer that was ended because its grammar needed too much work."""


def finish_reason(row: Mapping[str, Any], asked: Add) -> str:
    """Return the finish reason of a request's row, as in OpenAI's API and vLLM's metrics.

    It is `stop`, `length`, `abort`, `error`, or empty if the request was refused.
    """
    if row["reason"] == GRAMMAR_FAILED:
        return "error"
    if row["status"] == "rejected":
        return ""
    if row["status"] != "finished":
        return "abort"
    if not asked.max_tokens:  # as vLLM says of pooling requests
        return "stop"
    return "stop" if row["reason"] or row["output_tokens"] < asked.max_tokens else "length"


class Abort(Message):
    """An order to abort a request: `why` is `stop` after a stop string, else the reason why its client is gone."""

    id: int
    why: str


class Delivered(Message):
    """A report that the whole answer was sent, with the times at which its first and last text were made and sent."""

    id: int
    first_text_ns: int
    first_sent_ns: int
    last_text_ns: int
    last_sent_ns: int


class Late(Message):
    """A report of the delays with which an API process sent tokens since the last report: bucket counts and the sum."""

    counts: list[int]
    sum_s: float


class Asked(Message):
    """A report since the last one: numbers of HTTP requests by method, path and kind of status (`2xx`).

    `parsed` has how often text was read for tool calls, by mode, outcome and type of the request.
    """

    counts: list[tuple[str, str, str, int]]
    parsed: list[tuple[str, str, str, int]]


class Pulse(Message):
    """A question whether the engine process still runs; `Alive` answers it."""


class Alive(Message):
    """The answer of an engine process that runs; `well` is False if one of its engines was stopped."""

    well: bool


class Scrape(Message):
    """A request for the metrics of all replicas or of one; a `Reply` with the same id answers it."""

    id: int
    replica: int | None = None


class Follow(Message):
    """A request for the trace of the answer called `name`; a `Reply` with the same id answers it."""

    id: int
    name: str


class Plant(Message):
    """New failures of requests as JSON, or empty text to ask for the present ones; a `Reply` has the present ones."""

    id: int
    failures: str


class Rest(Message):
    """An order to sleep at `level`, or to wake up if `level` is None; a `Reply` has the state when it is reached.

    With `aborts` the requests under way are aborted; otherwise they end first. With `asks` the message is only a
    question for the present state.
    """

    id: int
    level: int | None = None
    aborts: bool = True
    asks: bool = False


class Show(Message):
    """Numbers to show as metrics, as JSON, or empty text to ask for them; a `Reply` has the present ones."""

    id: int
    metrics: str


class Reply(Message):
    """An answer: metrics in Prometheus' text format, or a trace, failures and so on as JSON; empty if there is none."""

    id: int
    text: bytes


class Output(msgspec.Struct, array_like=True):
    """New tokens of one request and, if it has ended, the reason.

    Attributes:
        cached: number of tokens of the prompt whose KV was in the prefix cache; 0 until it is known
        prompt_logprobs: logprobs of the prompt after its first token, with the first output; None if not wanted
        pooled: result of a pooling request: a final hidden state
        finish: empty while the request goes on; else `length`, `stop`, `abort`, `cut` (its connection is to be broken),
            `refused`, `crashed` or `failed` (its grammar gave up)
        reason: reason of `finish` in words, if needed
        status: HTTP status of a refusal; 0 if it follows from `finish` and `reason`
    """

    id: int
    tokens: list[int]
    logprobs: list[Logprob] | None = None
    finish: str = ""
    reason: str = ""
    status: int = 0
    pooled: list[float] | None = None
    cached: int = 0
    prompt_logprobs: list[PromptLogprob] | None = None

    def add(self, more: Output) -> None:
        """Append the next output of the same request."""
        self.tokens += more.tokens
        if self.logprobs is not None:
            self.logprobs += more.logprobs or []
        self.finish, self.reason, self.status = more.finish, more.reason, more.status
        self.pooled = self.pooled or more.pooled
        self.cached = self.cached or more.cached
        if self.prompt_logprobs is None:
            self.prompt_logprobs = more.prompt_logprobs


class Outputs(Message):
    """The outputs of one step for one API process; they should be sent to clients at `due_ns`.

    `stalled_ns` is the time for which the run of a twin has paused so far, because its machine stalled.
    """

    due_ns: int
    outputs: list[Output]
    stalled_ns: int = 0


class Drain(Message):
    """A message from the engine process: it takes no more requests, because it is about to end."""


To = Hello | Add | Abort | Delivered | Late | Asked | Pulse | Scrape | Follow | Plant | Rest | Show
From = About | Outputs | Alive | Reply | Drain

encode = msgspec.msgpack.Encoder().encode
read_request = msgspec.msgpack.Decoder(To).decode
read_answer = msgspec.msgpack.Decoder(From).decode
