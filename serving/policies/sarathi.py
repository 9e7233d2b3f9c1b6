"""The `sarathi` policy: stall-free batches, as in Sarathi-Serve.

The source is Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve" (OSDI 2024),
algorithm 3. A step first takes every decoding request, then continues prompts that have begun, and then admits new
prompts, in chunks up to a token budget. vLLM has adopted most of this. Two things differ from `vllm`: the budget of the
chunks is not the budget of the step, and no decoding request is ever preempted for a chunk.
"""

from __future__ import annotations

from tokentwin.serving.policies.vllm import VllmScheduler, by_decodes_first
from tokentwin.serving.request import Request


class SarathiScheduler(VllmScheduler):
    """A scheduler that serves decodes first. Prompt chunks share what decodes leave of `sarathi_token_budget`.

    Decodes may exceed that budget, up to `max_num_batched_tokens`. If the latter is at least `max_num_seqs`, no decode
    ever waits for tokens. Under `policy: priority` the least urgent requests are preempted, decoding or not.
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
        """Return the request that gets tokens last, which is never one that already has tokens in this step."""
        if self.config.policy == "priority":
            return super().victim()
        return max(self.running.values(), key=by_decodes_first)
