"""The KV memory of an encoder, which keeps no KV: its attention reads every token of a prompt in one step.

vLLM gives the layers of such a model no KV cache, so memory never makes a request wait.
"""

from __future__ import annotations

from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.kv.blocks import Hit
from tokentwin.serving.kv.contiguous_pool import ContiguousPool
from tokentwin.serving.request import Request


class NoPool(ContiguousPool):
    """A pool from which requests take no blocks."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config, names=False)

    def reserved(self, request: Request) -> int:
        return 0

    def admit(self, request: Request, hit: Hit) -> None:
        """Do nothing, because the request needs no blocks."""

    def release(self, request: Request, may_return: bool = False) -> None:
        self.version += 1
