"""The share of prompts that an infinite prefix cache would hold: an upper bound for every cache on a workload.

A request hits the longest prefix that its tokens share with any earlier request: its prompt, or its prompt and output.
A trie of segments finds this prefix without materialising a token. Earlier means earlier in arrival order, as if every
request had been answered by then.
"""

from __future__ import annotations

from serving.workload import PRIVATE, WorkloadRequest

_ROOT = 0


class PrefixReuse:
    """The prefixes of the requests so far.

    `hit` takes the requests in order and returns the tokens that they share with earlier ones.
    """

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, str, int], int] = {}
        self._longest: dict[tuple[int, str], int] = {}

    def hit(self, request: WorkloadRequest) -> int:
        """Return the prompt tokens of `request` that earlier requests share, then add its tokens to the cache."""
        hit, matching, node = 0, True, _ROOT
        for name, tokens in request.prompt:
            if name == PRIVATE:  # no other request has these tokens, nor any that follow them
                return hit
            known = self._nodes.get((node, name, tokens))
            if matching:
                # The prefixes part inside this segment, unless another request goes on from its end.
                longest = self._longest.get((node, name), 0)
                hit += min(tokens, longest)
                matching = known is not None
            node = self._add(node, name, tokens) if known is None else known
        # The last token of an output never goes through the model, so no cache has it.
        self._longest[node, f"out:{request.id}"] = request.output_len - 1
        return hit

    def _add(self, node: int, name: str, tokens: int) -> int:
        if self._longest.get((node, name), 0) < tokens:
            self._longest[node, name] = tokens
        child = self._nodes[node, name, tokens] = len(self._nodes) + 1
        return child
