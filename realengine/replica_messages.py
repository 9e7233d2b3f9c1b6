"""What goes through the pipe of a process with one of several engines, whichever engine that is.

The process first says `About`, once its engine is loaded. Each call is `(name, arguments)`, which it answers. In the
call `replay` it says `Ready`, is sent the moment that times count from (ns, on `perf_counter_ns`), and then `Arrival`,
`HangUp` and `End`; it says `Told` after each step, and at last `Ran`.

Nothing here needs torch, so that vLLM's own process can use it, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from serving.workload import WorkloadRequest


class About(NamedTuple):
    """What an engine process runs.

    deployment     as JSON, with the KV blocks that it found to fit
    num_blocks     of these, the ones that requests can have
    forces         whether the output of a request can be forced
    memory_report  how its memory is used, empty where that is not known
    """

    deployment: str
    hardware: dict[str, str | int]
    vocab_size: int
    num_blocks: int
    notes: dict[str, Any]
    forces: bool
    memory_report: str = ""


class Arrival(NamedTuple):
    """To a process: a request, sent at `send_ns` of the run, with token ids of its prompt and its output, if forced."""

    request: WorkloadRequest
    prompt: list[int]
    output: list[int] | None
    send_ns: int


class HangUp(NamedTuple):
    """To a process: nobody waits for request `id` any more."""

    id: int


class End(NamedTuple):
    """To a process: nothing more comes. What has not ended by then is unfinished."""


class Told(NamedTuple):
    """From a process: rows of requests that have left and of steps, and the step that has just ended, if one has.

    said     by request that has left and whose output was not forced, what that was
    sampled  requests that got a token in it, one entry a token
    """

    requests: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    said: dict[int, list[int]]
    step: int | None = None
    sampled: tuple[int, ...] = ()


class Ready(NamedTuple):
    """From a process, first of a run: it waits for the moment that times count from."""


class Ran(NamedTuple):
    """From a process, last of a run; the share of its steps' time that launches took, where that is known."""

    launching_share: float | None
