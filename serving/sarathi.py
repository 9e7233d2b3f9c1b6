"""The `sarathi` policy: stall-free batches, after Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM
Inference with Sarathi-Serve" (OSDI 2024), algorithm 3.

A step takes every decoding request first, then goes on with prompts that have begun, then admits new ones, in chunks
that fill it up to a token budget. `vllm` has taken most of that over; what differs is that the budget of the chunks is
not that of the step, and that no decode is ever preempted for the sake of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterable

from serving.request import Request
from serving.vllm import VllmScheduler


class SarathiScheduler(VllmScheduler):
    """Decodes before chunks, which get what decodes leave of `sarathi_token_budget`.

    Decodes may exceed the token budget, up to `max_num_batched_tokens`: with at least `max_num_seqs` of those, none
    ever waits for tokens. Under `policy: priority` victims are the least urgent, decoding or not.
    """

    def _step_budget(self) -> int:
        chunks = self.config.sarathi_token_budget
        if not chunks:
            return self._budget
        beside = sum(self._wanted(r, self._budget) for r in self._others.values() if not _prefills(r))
        decodes = len(self.decodes.members) + beside
        return min(max(chunks, decodes), self._budget)

    def _turns(self, requests: Iterable[Request]) -> list[Request]:
        return sorted(requests, key=_turn)

    def _decodes_first(self, wanting: list[tuple[Request, int]], left: int) -> bool:
        return sum(not _prefills(request) for request, _ in wanting) <= left

    def _victim(self) -> Request:
        """The last to get tokens, so never one that already has them in this step."""
        if self.config.policy == "priority":
            return super()._victim()
        return max(self.running.values(), key=_turn)


def _prefills(request: Request) -> bool:
    return request.pending > 1


def _turn(request: Request) -> tuple[bool, int]:
    return _prefills(request), request.admitted
