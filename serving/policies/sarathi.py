"""The `sarathi` policy: stall-free batches, as in Sarathi-Serve.

The source is Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve" (OSDI 2024),
algorithm 3. A step takes every decoding request first, then goes on with prompts that have begun, then admits new ones,
in chunks that fill it up to a token budget. `vllm` has taken most of that over. Two things differ: the budget of the
chunks is not the budget of the step, and no decode is ever preempted for the sake of a chunk.
"""

from __future__ import annotations

from serving.policies.vllm import VllmScheduler, by_decodes_first
from serving.request import Request


class SarathiScheduler(VllmScheduler):
    """A scheduler with decodes before chunks, which get the tokens of `sarathi_token_budget` that decodes leave.

    Decodes may exceed that budget, up to `max_num_batched_tokens`: if this is at least `max_num_seqs`, no decode ever
    waits for tokens. Under `policy: priority` victims are the least urgent, decoding or not.
    """

    decodes_first = True

    def step_budget(self) -> int:
        most = super().step_budget()
        chunks = self.config.sarathi_token_budget
        if not chunks:
            return most
        beside = sum(self.wanted(request) for request in self.unsteady.values() if request.pending == 1)
        return min(max(chunks, len(self.decodes.members) + beside), most)

    def victim(self) -> Request:
        """Return the last request to get tokens, so never one that already has them in this step."""
        if self.config.policy == "priority":
            return super().victim()
        return max(self.running.values(), key=by_decodes_first)
