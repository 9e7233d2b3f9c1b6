"""What goes through the pipe of a process with vLLM, beside the `realengine.replica_messages` of one of several.

The first message is `Begin`, which `About` answers. Each call is answered by what the method of `VllmReplayer` returns,
or by an exception. While a call replays a whole workload, `Ended` comes too, and whatever is sent stops the replay.
"""

from __future__ import annotations

from typing import NamedTuple


class Begin(NamedTuple):
    """Set up an engine.

    Attributes:
        words: the options of a `vllm serve` command
        model: what recordings call the model
    """

    words: list[str]
    model: str


class Ended(NamedTuple):
    """So many requests of the replay have ended."""

    requests: int
