"""The messages between the API processes and the engine process, as MessagePack over ZeroMQ.

Every API process has a DEALER socket, the engine process one ROUTER. Ids of requests are the API process's own. All
times are in ns of the machine's monotonic clock, which its processes share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from realengine.logit_rules import LogitRules, Logprob


class Message(msgspec.Struct, array_like=True, tag=True):
    """A message; its tag is the class's name."""


class Hello(Message):
    """An API process's first message, also after a reconnection; the engine process answers with `About`."""


class About(Message):
    """The served model: its name, the most tokens a request may have, and the tokens that end an answer.

    Attributes:
        texts: folder of the tokenizer; empty if the model brings none
        twin: whether nothing is computed, so that every token is a text of its own
        run: the columns of `runs` that describe an engine, for a process that records several; else empty
        role: `serve`, or the part of a request that a gateway sends here: `prefill` or `decode`
        places: with ports per replica: the replica behind each port, -1 while there is none
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

    @property
    def kv_tokens(self) -> int:
        return int(self.run["num_blocks"]) * self.block_size


class Add(Message):
    """A request. `received_ns` is when HTTP had it; if `seed` is None, its id seeds its draws.

    Attributes:
        stop_ids: tokens that end every answer, empty if they must not; `also_stop_ids` end this answer only
        logprobs: number of alternatives returned with each token of the answer; None if no log-probabilities are wanted
        place: place in the fleet of the replica whose port it came to; None if a router chooses
        prefilled_at: server that has the KV of its prompt; empty if the prompt must be computed
        client_id: the client's name for it, or empty
        followed: whether its journey is recorded
        grammar: constraint on its answer, in the form of `realengine.grammar`; empty for any text
        rules: changes to its logits; None for none
        operation: OpenTelemetry's name of the operation; `answer_id` is the name of its answer
        traceparent: the client's span, from its header; `tracestate` holds what vendors add
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


def finish_reason(row: Mapping[str, Any], asked: Add) -> str:
    """Return the finish reason of a row in OpenAI's API and vLLM's metrics: `stop`, `length` or `abort`.

    It is empty for a request that was refused.
    """
    if row["status"] == "rejected":
        return ""
    if row["status"] != "finished":
        return "abort"
    return "stop" if row["reason"] or row["output_tokens"] < asked.max_tokens else "length"


class Abort(Message):
    """An order to give up a request: `why` is `stop` after a stop string, else the reason why its client is gone."""

    id: int
    why: str


class Delivered(Message):
    """A report that the client has the whole answer: when its first and last text were made and written."""

    id: int
    first_text_ns: int
    first_sent_ns: int
    last_text_ns: int
    last_sent_ns: int


class Late(Message):
    """A report of how late tokens left an API process since the last report: counts per bucket, and the sum."""

    counts: list[int]
    sum_s: float


class Scrape(Message):
    """A request for the metrics of all replicas, or of one; `Reply` with the same id answers it."""

    id: int
    replica: int | None = None


class Follow(Message):
    """A request for the journey of the answer called `name`; `Reply` with the same id answers it."""

    id: int
    name: str


class Reply(Message):
    """An answer: metrics in Prometheus' text format, or a journey in JSON; empty if there is none."""

    id: int
    text: bytes


class Output(msgspec.Struct, array_like=True):
    """Tokens of one request, and how it ended.

    Attributes:
        finish: empty while it goes on; `length`, `stop`, `abort`; `cut`, when its connection breaks; or `refused`,
            `crashed`, with the `reason` and, if it does not follow from that, HTTP's `status`
    """

    id: int
    tokens: list[int]
    logprobs: list[Logprob] | None = None
    finish: str = ""
    reason: str = ""
    status: int = 0


class Outputs(Message):
    """Tokens of one step for one API process, which should have left at `due_ns`."""

    due_ns: int
    outputs: list[Output]


class Drain(Message):
    """A message of the engine process: it takes no more requests, because it is about to end."""


To = Hello | Add | Abort | Delivered | Late | Scrape | Follow
From = About | Outputs | Reply | Drain

encode = msgspec.msgpack.Encoder().encode
read_request = msgspec.msgpack.Decoder(To).decode
read_answer = msgspec.msgpack.Decoder(From).decode
