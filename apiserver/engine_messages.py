"""The messages between the process that routes requests and each real engine, on the pipe of a `ReplicaProcess`.

An engine receives `Routed` and `messages.Abort`, and finally `End`. It sends lists of messages: `messages.About` when
it serves, and then, for each step, rows of requests that ended, `StepEnd`, rows of steps, `KvBatch` and
`messages.Outputs`. Request ids are those of the routing process. Times are in ns since the start of the run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tokentwin.apiserver.messages import Add
from tokentwin.serving.workload import WorkloadRequest


class Routed(NamedTuple):
    """Message to an engine: a request, in the API's form and in the form of a workload."""

    asked: Add
    arrived: WorkloadRequest


class Row(NamedTuple):
    """Message from an engine: a row of the dataset `requests` or `steps`."""

    dataset: str
    columns: dict[str, Any]


class KvBatch(NamedTuple):
    """Message from an engine: a batch of KV events in the published format."""

    batch: bytes


class Admitted(NamedTuple):
    """A request that a step admitted, for the first time or again.

    Attributes:
        prompt_tokens: number of prompt tokens
        hit_tokens: number of prompt tokens that were cached at the first admission
        preemptions: number of earlier preemptions; in the overlapped loop, at the end of the step
    """

    id: int
    prompt_tokens: int
    hit_tokens: int
    preemptions: int


class StepEnd(NamedTuple):
    """Message from an engine, for the metrics: a step of `replica` has ended at `now_ns` of the run.

    Attributes:
        deferred: number of the waiting requests that wait for KV from outside the engine
        usage: number of referenced KV blocks / number of KV blocks
        tokens: number of tokens computed in the step; 0 after an abort
        generated: number of output tokens of the step
        sampled: ids of the requests that got output tokens
        drafts: for each verified draft, its number of tokens and the number of accepted tokens
        adapters: names of the LoRA adapters of running and of waiting requests, with commas between them
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
    adapters: tuple[str, str] = ("", "")
