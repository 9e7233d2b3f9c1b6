"""KV blocks as counts, for models with layers that keep a constant state, for which each request holds blocks, too.

As in vLLM's hybrid allocator, a state lies in a block of the one pool, one for each group of such layers, from a
request's admission to its end, and no other request finds it.
"""

from __future__ import annotations

from serving.deployments.config import SchedulerConfig
from serving.kv.block_pool import BlockPool
from serving.kv.blocks import Hit
from serving.kv.content import Content
from serving.request import Request


class StatePool(BlockPool):
    """A pool in which an admitted request holds `config.state_blocks` more blocks. `Request.held` counts the others."""

    def __init__(self, config: SchedulerConfig, content: Content | None = None) -> None:
        super().__init__(config, content)
        self._states = config.state_blocks
        self._admitted: set[int] = set()

    def admit(self, request: Request, hit: Hit) -> None:
        super().admit(request, hit)
        self._admitted.add(request.id)
        self._take(self._states)
        self._beside += self._states

    def release(self, request: Request, may_return: bool = False) -> None:
        super().release(request, may_return)
        if request.id in self._admitted:
            self._admitted.remove(request.id)
            self._put_first(self._states, [])
            self._beside -= self._states
