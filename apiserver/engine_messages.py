"""The messages between the process that routes and each real engine, through the pipe of a `ReplicaProcess`.

An engine gets `Routed`, `messages.Abort` and at last `End`. It sends lists of messages: `messages.About` once it
serves, and then, for each step, rows of requests that ended, `StepEnd`, rows of steps, `KvBatch` and
`messages.Outputs`. Ids are those of the process that routes; times are in ns of the run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from apiserver.messages import Add
from serving.workload import WorkloadRequest


class Routed(NamedTuple):
    """Message to an engine: a request, as it was asked and as workloads have it."""

    asked: Add
    arrived: WorkloadRequest


class Row(NamedTuple):
    """Message from an engine: a row of `requests` or `steps`."""

    dataset: str
    columns: dict[str, Any]


class KvBatch(NamedTuple):
    """Message from an engine: KV events, as they are published."""

    batch: bytes


class Admitted(NamedTuple):
    """A request that a step admitted, for the first time or again.

    It holds the prompt's tokens, how many of them were cached at the first admission, and the preemptions before.
    """

    id: int
    prompt_tokens: int
    hit_tokens: int
    preemptions: int


class StepEnd(NamedTuple):
    """Message from an engine: the end of a step of `replica` at `now_ns` of the run, for the metrics.

    Attributes:
        deferred: the waiting requests that wait for KV from elsewhere
        usage: KV blocks referenced / KV blocks
        tokens: computed in the step
        generated: output tokens of the step for the requests `sampled`
        drafts: for each draft that it verified: its tokens, and how many of them were accepted
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
