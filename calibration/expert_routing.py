"""The distribution of an MoE model's tokens over its experts, and the imbalance between devices that share them.

A step waits for the device whose experts got the most tokens. Random imbalance remains even if every token chooses its
experts evenly and independently. This random imbalance shrinks as steps grow. Trained routers are more uneven, to an
extent that depends on the model and the traffic.
"""

from __future__ import annotations

from functools import cache
from math import erf, sqrt
from typing import Any

import numpy as np

from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.model_spec import ModelSpec


def busiest_over_mean(model: ModelSpec, deployment: Deployment, tokens: Any) -> Any:
    """Return the ratio of the busiest device's load to the mean load in steps with `tokens` tokens."""
    if deployment.expert_imbalance == "random":
        groups = model.expert_groups or 1, model.groups_per_token or 1
        devices = deployment.expert_parallel_size
        return random_imbalance(model.num_experts, model.experts_per_token, devices, tokens, groups)
    return deployment.expert_imbalance


def experts_touched(experts: int, topk: int, tokens: Any) -> Any:
    """Return the expected number of experts that get a token if tokens choose `topk` evenly and independently."""
    return experts * (1.0 - (1.0 - topk / experts) ** np.asarray(tokens, dtype=np.float64))


def random_imbalance(experts: int, topk: int, devices: int, tokens: Any, groups: tuple[int, int] = (1, 1)) -> Any:
    """Return the expected ratio of maximum to mean rows per device if tokens choose `topk` of `experts` at random.

    Args:
        groups: the number of groups of experts, and the number of groups that a token chooses first (DeepSeek-V3,
            section 2.1.2)

    A row is one token for one expert. The number of rows that one token sends to a device has a hypergeometric
    distribution over the experts of the token's groups. Over many tokens the loads of devices are normal. Their sum is
    fixed, so each pair has the correlation -1 / (devices - 1), and their expected maximum is that of independent
    normals times sqrt(devices / (devices - 1)). The result is at most the ratio that a single token can have.
    """
    tokens = np.maximum(np.asarray(tokens, dtype=np.float64), 1.0)
    own = experts / devices
    mean = topk / devices  # rows that a token sends to a device
    variance = _rows_variance(experts, topk, devices, *groups)
    spread = np.sqrt(variance / tokens) / mean
    expected = 1.0 + sqrt(devices / (devices - 1)) * expected_maximum(devices) * spread
    return np.minimum(expected, min(topk, own) / mean)


def _rows_variance(experts: int, topk: int, devices: int, groups: int, chosen: int) -> float:
    """Return the variance of the number of rows that one token sends to one device."""
    # numbers of experts: of a device, and of the chosen groups
    own, within = experts / devices, experts * chosen / groups
    local = max(groups / devices, 1.0)  # number of groups that have experts on the device
    share = chosen / groups
    # variance of the number of these groups that a token chooses
    spread = local * share * (1.0 - share) * (groups - local) / max(groups - 1, 1)
    # moments of the device's eligible experts
    first, second = own * share, (own / local) ** 2 * (spread + (local * share) ** 2)
    scale = topk / within
    drawn = scale * (first - second / within) * (within - topk) / max(within - 1.0, 1.0)
    return drawn + scale**2 * (second - first**2)


@cache
def expected_maximum(count: int) -> float:
    """Return the expected maximum of `count` independent standard normals.

    It is the integral of 1 - F^n - (1 - F)^n over the positive half-line.
    """
    x = np.linspace(0.0, 12.0, 24_001)
    below = np.array([0.5 + 0.5 * erf(value / sqrt(2.0)) for value in x.tolist()])
    return float(np.trapezoid(1.0 - below**count - (1.0 - below) ** count, x))
