"""What API processes and the engine process say to each other, as MessagePack over ZeroMQ.

Every API process has a DEALER socket, the engine process one ROUTER. Ids of requests are the API process's own. All
times are of the machine's monotonic clock, in ns, which its processes share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from realengine.logit_rules import LogitRules
from realengine.logprob import Logprob


class Message(msgspec.Struct, array_like=True, tag=True):
    """Anything said; its tag is the class's name."""


class Hello(Message):
    """From an API process, first of all and after a reconnection; answered by `About`."""


class About(Message):
    """What is served: the model's name, the most tokens a request may have, and the tokens that end an answer.

    texts   folder of the tokenizer; empty where the model brings none
    twin    whether nothing is computed, so that every token is a text of its own
    run     the columns of `runs` that tell of an engine, for a process that records several; else empty
    role    `serve`, or what a gateway has it do of requests: `prefill` or `decode`
    places  where ports are of one replica each: the replica behind each, -1 while there is none
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
    """A request. `seed` None draws by the request's id; `received_ns` is when HTTP had it.

    stop_ids     tokens that end every answer, empty where they are not to; `also_stop_ids` those that end this one
    logprobs     how many tokens are told beside each of the answer; None where no log-probability is
    place        place in the fleet of the replica whose port it came to; None where a router chooses
    prefilled_at  server that has the KV of its prompt; empty where it is to be computed
    client_id    what its client calls it, or empty
    followed     whether its journey is to be kept
    grammar      what its answer keeps to, as `realengine.grammar` writes it; empty for any text
    rules        what is done to its logits; None for nothing
    operation    what was asked for, as OpenTelemetry names it; its answer is called `answer_id`
    traceparent  the client's span and, `tracestate`, what vendors add, as its headers had them
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
    """How OpenAI's API and vLLM's metrics name the end of a request: `stop`, `length` or `abort`, by its row; empty for
    one that was refused."""
    if row["status"] == "rejected":
        return ""
    if row["status"] != "finished":
        return "abort"
    return "stop" if row["reason"] or row["output_tokens"] < asked.max_tokens else "length"


class Abort(Message):
    """Nobody waits for the rest of it: `stop` when a stop string ended it, else why its client is gone."""

    id: int
    why: str


class Delivered(Message):
    """The whole answer is with its client: when its first and its last text were made, and were written."""

    id: int
    first_text_ns: int
    first_sent_ns: int
    last_text_ns: int
    last_sent_ns: int


class Late(Message):
    """How late tokens left an API process since it last said so: how many by the metric's buckets, and the sum."""

    counts: list[int]
    sum_s: float


class Scrape(Message):
    """Asks for the metrics, or those of one `replica`; answered by `Told` with the same id."""

    id: int
    replica: int | None = None


class Follow(Message):
    """Asks for the journey of the request whose answer is called `name`; answered by `Told` with the same id."""

    id: int
    name: str


class Told(Message):
    """What was asked: metrics in Prometheus' text format, a journey in JSON; empty if there is none."""

    id: int
    text: bytes


class Output(msgspec.Struct, array_like=True):
    """Tokens of one request, and how it ended.

    finish  empty while it goes on; `length`, `stop`, `abort`; `cut`, when its connection breaks; or `refused`,
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


class Row(Message):
    """From one of several engine processes: a row of `requests` or `steps`, with ids of who asked."""

    dataset: str
    columns: dict[str, Any]


class Admitted(msgspec.Struct, array_like=True):
    """A request that a step admitted, first or again: its prompt, what of it was cached at first, and how often it was
    preempted before."""

    id: int
    prompt_tokens: int
    hit_tokens: int
    preemptions: int


class StepEnd(Message):
    """A step of `replica` ended at `now_ns` of the run: what metrics need to know of it, and of its scheduler now.

    deferred   of the requests that wait, those that wait for KV from elsewhere
    usage      KV blocks referenced / KV blocks
    tokens     computed in the step
    generated  output tokens that it brought to the requests `sampled`
    drafts     of each draft that it verified its tokens, and how many of them were accepted
    """

    replica: int
    now_ns: int
    running: int
    waiting: int
    deferred: int
    usage: float
    tokens: int
    generated: int
    sampled: list[int]
    admitted: list[Admitted]
    drafts: tuple[tuple[int, int], ...]


class Drain(Message):
    """From the engine process: it takes no more requests, because it is about to end."""


To = Hello | Add | Abort | Delivered | Late | Scrape | Follow
From = About | Outputs | Told | Row | StepEnd | Drain

encode = msgspec.msgpack.Encoder().encode
read_request = msgspec.msgpack.Decoder(To).decode
read_answer = msgspec.msgpack.Decoder(From).decode
