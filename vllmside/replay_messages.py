"""The messages through the pipe of a process with vLLM, beside those of `realengine.parallel.replica_pipe`.

The first message is `Begin`, which `About` answers. The answer to a call is the return value of the method of
`VllmReplayer`, or an exception. While a call replays a whole workload, `Ended` also comes, and any message to the
process stops the replay.
"""

from __future__ import annotations

from typing import NamedTuple


class Begin(NamedTuple):
    """A message that sets up an engine.

    Attributes:
        words: the options of a `vllm serve` command
        model: what recordings call the model
    """

    words: list[str]
    model: str


class Ended(NamedTuple):
    """A message that so many requests of the replay have ended."""

    requests: int
