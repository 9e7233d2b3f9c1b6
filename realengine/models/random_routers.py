"""Random routers whose experts get uneven loads, as those of trained models do.

With normally distributed weights, every expert of a random model would be chosen equally often. NVIDIA's AIConfigurator
times experts under loads with the density x^-1.01, as a model of real traffic ("Power-Law Distribution in MoE Workload
Simulation"); the kernel times that this project predicts with are from these tables. The loads here have the density
1/x. That the busiest expert gets `_SPAN` times as much as the idlest is an assumption.
"""

from __future__ import annotations

from statistics import NormalDist

import torch

_SPAN = 20.0  # the busiest of many experts then gets about 3 times the mean
_MOST = 0.45  # fraction of tokens; a score with mean 0 is above any positive threshold in less than half of the cases
_ROUNDS = 40


def expert_shares(experts: int, topk: int) -> list[float]:
    """Return the fraction of tokens that choose each expert, ascending; the sum is `topk`, at most 0.45 an expert."""
    loads = [_SPAN ** ((number + 0.5) / experts) for number in range(experts)]
    scale, shares = topk / sum(loads), loads
    for _ in range(_ROUNDS):  # what the most wanted experts cannot take goes to the others
        shares = [min(scale * load, _MOST) for load in loads]
        scale *= topk / sum(shares)
    return shares


def row_scales(experts: int, topk: int, generator: torch.Generator) -> torch.Tensor:
    """Return a factor `[experts]` for each row of a router with normal weights, in random order.

    If scores are normal with standard deviation s, an expert is above the threshold t with probability 1 - F(t / s), F
    being the normal distribution function. For t = 1 this gives s for each share. The median factor is made 1.
    """
    scales = torch.tensor([1 / NormalDist().inv_cdf(1 - share) for share in expert_shares(experts, topk)])
    order = torch.randperm(experts, generator=generator, device=generator.device).cpu()
    return (scales / scales.median())[order]
