"""Messages through the pipe of a process with vLLM, in addition to those of `realengine.parallel.replica_pipe`.

The first message is `Begin`, and its answer is `About`. The answer to a call is the return value of the method of
`VllmReplayer`, or an exception. During a call that replays a whole workload, the process also sends `Ended`, and any
message to the process stops the replay.
"""

from __future__ import annotations

from typing import NamedTuple


class Begin(NamedTuple):
    """A message that sets up an engine.

    Attributes:
        words: options of a `vllm serve` command
        model: name of the model in recordings
        adapters: folder with the folders of LoRA adapters; empty if there are none
    """

    words: list[str]
    model: str
    adapters: str = ""


class Ended(NamedTuple):
    """A message with the number of requests of the replay that have ended."""

    requests: int
