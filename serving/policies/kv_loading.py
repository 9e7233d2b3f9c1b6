"""Requests whose KV is loaded from outside instead of computed, under vLLM's rules for asynchronous loads.

While KV is on its way, its request holds the blocks for it and others pass it; once it is there, the request goes
first. What lies outside, and when a load ends, is `ExternalKv`'s affair.
"""

from __future__ import annotations

from serving.kv.blocks import Hit, KvBlocks
from serving.kv.external import ExternalKv
from serving.request import Request, Status


class KvLoading:
    """The loads of one scheduler.

    ready  waiting requests whose KV has been loaded, in the order in which it came
    """

    def __init__(self, external: ExternalKv, pool: KvBlocks, block_size: int) -> None:
        self.external = external
        self.ready: dict[int, Request] = {}
        self._pool = pool
        self._block_size = block_size

    def load(self, request: Request, hit: Hit, tokens: int, slots: int) -> None:
        """Begin to load `tokens` tokens after those of `hit`.

        Blocks are taken for `slots` tokens, which are all that its next step can want, so that what has been loaded
        waits for nobody: requests that hold some blocks and lack others could otherwise wait for one another for ever.
        """
        found = hit.blocks * self._block_size
        self._pool.admit(request, hit)
        self._pool.extend(request, slots)
        request.loading = found + tokens
        request.status = Status.LOADING
        self.external.load(request, found, tokens)

    def loaded(self, request: Request) -> None:
        """The KV that `load` loads is there."""
        if request.ended:
            self._pool.release(request)
            return
        if request.first_hit is None:
            request.first_hit = request.hashed * self._block_size
        request.found(request.loading)
        self._pool.register(request, request.loading)
        request.loading = 0
        request.status = Status.WAITING
        self.ready[request.id] = request

    def load_failed(self, request: Request) -> None:
        """It never will be there."""
        self._pool.release(request)
        request.loading = 0
        if not request.ended:
            request.status = Status.WAITING

    def keeps(self, request: Request, status: Status) -> bool:
        """Whether the blocks of a request that ends with `status` are written to, or still needed elsewhere."""
        if status is Status.FINISHED:
            return request.held > 0 and self.external.keeps(request)
        return request.loading > 0
