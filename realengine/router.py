"""The choice of each token's experts, and the weights of their answers.

Mixtral's and Qwen's routers take the softmax over all experts. DeepSeek-V3's, which dots.llm1 also has, takes a sigmoid
of each score, chooses by it plus a bias learnt for balance, and weighs without the bias. Groups of experts may be
chosen first (DeepSeek-V2 and V3, section 2.1).
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from realengine.layer_ops import Routing
from realengine.loading import WeightLoader
from serving.deployments.model_spec import ModelSpec

BIAS = "e_score_correction_bias"


class Router:
    """The router called `gate` of a layer's mixture; `own` are the experts of this rank.

    `chosen` are the experts `[T, k]` of each token of the last step.
    """

    chosen: torch.Tensor

    def __init__(self, spec: ModelSpec, weights: WeightLoader, gate: str, own: range) -> None:
        self._spec = spec
        self._weight = weights.unrounded(gate)
        self._bias = weights.take(f"{gate}.{BIAS}", torch.float32) if spec.router_bias else None
        if spec.router_bias:  # DeepSeek computes all of this router in float32
            self._weight = self._weight.float()
        self._bounds = torch.arange(own.start, own.stop + 1, device=self._weight.device)

    def __call__(self, x: torch.Tensor) -> Routing:
        """Return the routing of `x` `[T, hidden]`.

        Mixtral's softmax over the best k is the normalised softmax over all experts.
        """
        logits = linear(x.to(self._weight.dtype), self._weight).float()
        scores = logits.softmax(-1) if self._bias is None else logits.sigmoid()
        ranked = scores if self._bias is None else scores + self._bias
        if self._spec.expert_groups:
            ranked = self._within_groups(ranked)
        self.chosen = ranked.topk(self._spec.experts_per_token).indices
        shares = scores.gather(1, self.chosen)
        if self._spec.norm_topk_prob:
            shares = shares / shares.sum(-1, keepdim=True)
        ordered, choices = self.chosen.flatten().sort(stable=True)
        offsets = torch.searchsorted(ordered, self._bounds, out_int32=True)
        factor = self._spec.routed_scaling_factor
        return Routing(choices, offsets, shares if factor == 1 else shares * factor)

    def _within_groups(self, ranked: torch.Tensor) -> torch.Tensor:
        """Return scores with -inf outside the best groups: V3 ranks a group by its two best experts, V2 by its best."""
        groups = ranked.unflatten(1, (self._spec.expert_groups, -1))
        best = groups.topk(1 if self._bias is None else 2).values.sum(-1).topk(self._spec.groups_per_token).indices
        outside = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, False)
        return groups.masked_fill(outside[..., None], -torch.inf).flatten(1)
