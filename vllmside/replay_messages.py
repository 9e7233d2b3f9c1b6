"""What goes through the pipe of a process that replays workloads on vLLM.

The first message is `Begin`, which `About` answers. Each `Call` is answered by what the method of `VllmReplayer`
returns, or by an exception. While a call replays a workload, `Ended` comes too, and whatever is sent stops the replay.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Begin(NamedTuple):
    """Set up an engine; `words` are the options of a `vllm serve` command."""

    words: list[str]


class About(NamedTuple):
    """The engine is there: the `deployment` that vLLM has resolved, as JSON, and vLLM's version."""

    deployment: str
    version: str


class Call(NamedTuple):
    """Call the method `name` of `VllmReplayer`."""

    name: str
    arguments: tuple[Any, ...] = ()


class Ended(NamedTuple):
    """So many requests of the replay have ended."""

    requests: int
