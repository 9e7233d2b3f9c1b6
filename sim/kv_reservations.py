"""KV transfers to decode replicas that reserve blocks for a prompt before it is prefilled, as in SGLang.

A request waits at its decode replica until that replica has blocks for the prompt. Then a prefill replica computes the
prompt and sends its KV at once. So no prompt is prefilled that would wait for blocks on a full decode pool. Users get
the first token when the KV has arrived and the decode replica plans its next step.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from tokentwin.serving.errors import UserError
from tokentwin.serving.request import Request
from tokentwin.serving.workload import WorkloadRequest
from tokentwin.sim.kv_transfers import KvTransfers, first_token_of
from tokentwin.sim.links import Flow
from tokentwin.sim.replica import Replica


class _Reserved:
    """The blocks that `replica` has reserved for `tokens` tokens of `request`, and what fills them.

    Attributes:
        prefill: prefill replica and its part of the request; None until the request is routed there
        flow: transfer of the KV; None until the prompt is prefilled, and after the transfer
        filled: True after the transfer
    """

    __slots__ = ("filled", "flow", "prefill", "replica", "request", "tokens")

    def __init__(self, replica: Replica, request: Request, tokens: int) -> None:
        self.replica = replica
        self.request = request
        self.tokens = tokens
        self.prefill: tuple[Replica, Request] | None = None
        self.flow: Flow | None = None
        self.filled = False


class KvReservations(KvTransfers):
    """The KV blocks that decode replicas reserve, and the transfers that fill them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._reserved: dict[int, _Reserved] = {}

    def begins_at_decode(self, request: WorkloadRequest) -> bool:
        return request.output_len > 1

    def offered(self, request: WorkloadRequest, role: str) -> WorkloadRequest:
        """Return the part of `request`, which has arrived, that a replica of `role` gets.

        Raises UserError for a request that must not load KV.
        """
        if role == "prefill":  # its first token is its last
            return first_token_of(request)
        if request.skip_reading_prefix_cache:
            remedy = f"cannot serve request {request.id}, which asks for log-probabilities of its prompt; "
            raise UserError("fleet.decode_reserves", "before-prefill", remedy + "use after-prefill")
        self._awaited.add(request.id)
        return request

    def gives(self, live: Request, request: WorkloadRequest) -> bool:
        return live.truth is request and not self._log.awaits_kv(live)

    def prefill(self, request: WorkloadRequest, replica: Replica) -> Request:
        """Let `replica` prefill `request`, which has its blocks and its compiled grammar on a decode replica.

        Return the part of the request that it runs.
        """
        part = replace(first_token_of(request), grammar_compile_ns=0)
        reserved = self._reserved[request.id]  # gone after the next call if the prompt can never fit on `replica`
        live = replica.prefill(part)
        reserved.prefill = replica, live
        return live

    def has_begun(self, id: int) -> bool:
        """Return whether the prompt of a request is being prefilled, or was."""
        reserved = self._reserved.get(id)
        return reserved is not None and reserved.prefill is not None and reserved.prefill[1].admitted >= 0

    def drop(self, id: int) -> None:
        """Stop the prefill and the transfer of a request, and free what they hold."""
        self._awaited.discard(id)
        reserved = self._reserved.pop(id, None)
        if reserved is None or reserved.filled:
            return
        reserved.replica.reserved_requests -= 1
        if reserved.flow is not None:
            self.links.cancel(reserved.flow)
        if reserved.prefill is not None:
            replica, request = reserved.prefill
            if request.ended:
                replica.release(request)
            else:
                replica.withdraw(request)
        reserved.replica.load_failed(reserved.request)

    def matched(self, request: Request, cached_tokens: int) -> int:
        return request.prompt_len - cached_tokens if request.id in self._awaited else 0

    def pull(self, replica: Replica, request: Request, tokens: int) -> None:
        self._reserved[request.id] = _Reserved(replica, request, tokens)
        replica.reserved_requests += 1
        self._log.reserved(request)
        self._on_awaiting(request)

    def admitted(self, request: Request) -> None:
        """Record that `request` runs.

        Raises UserError if its prompt has no KV, because it never fits beside the drafts of a step.
        """
        if request.id not in self._awaited:
            return  # it was preempted
        self._awaited.remove(request.id)
        if self._reserved.pop(request.id, None) is None:
            remedy = f"too few for the {request.prompt_len} prompt tokens of request {request.id} and drafts; raise it"
            raise UserError("scheduler.num_blocks", None, remedy)

    def _keep(self, source: Replica, request: Request) -> bool:
        reserved = self._reserved.get(request.id)
        if reserved is None:
            return False
        now = self._clock.now_ns
        self._log.handed_on(request, now)
        self._log.taken_over(reserved.replica.index, request, reserved.request)
        self._log.transfer_begins(request, now)
        size = self._exchanged.of_request + reserved.tokens * self._exchanged.of_token
        reserved.flow = self.links.start(source.index, reserved.replica.index, size, partial(self._pulled, request.id))
        return True

    def _pulled(self, id: int) -> None:
        reserved = self._reserved[id]
        assert reserved.prefill is not None
        source, prefilled = reserved.prefill
        reserved.filled, reserved.flow = True, None
        reserved.replica.reserved_requests -= 1
        self._log.transferred(reserved.request, self._clock.now_ns)
        source.release(prefilled)
        reserved.replica.loaded(reserved.request)
