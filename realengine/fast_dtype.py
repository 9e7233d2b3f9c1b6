"""The choice of a CPU's faster type: without bfloat16 units it takes several times as long for it as for float32."""

from __future__ import annotations

from time import perf_counter_ns

import torch

from serving.deployments.config import Deployment

_SHAPE = 1536, 576  # a projection of SmolLM2
_ROWS = 1, 8, 32
_TRIES = 5
_CLEARLY = 1.5  # times as fast: less may be noise, and bfloat16 is what a GPU would run


def with_fast_dtype(deployment: Deployment) -> tuple[Deployment, str]:
    """Return the deployment with the faster type if it runs on the CPU and states none, and the reason for a change."""
    if deployment.device != "cpu" or "dtype" in deployment.model_fields_set:
        return deployment, ""
    torch.set_num_threads(deployment.threads)
    times_ns = {name: _time_ns(getattr(torch, name)) for name in ("bfloat16", "float32")}
    gain = times_ns["bfloat16"] / times_ns["float32"]
    if gain < _CLEARLY:
        return deployment, ""
    reason = f"float32, which this CPU computes {gain:.1f} times as fast as bfloat16; state dtype to choose"
    return deployment.model_copy(update={"dtype": "float32"}), reason


def _time_ns(dtype: torch.dtype) -> int:
    """Return the time of one projection over all batch sizes, each the fastest of a few tries."""
    weight = torch.ones(_SHAPE, dtype=dtype)
    total = 0
    for rows in _ROWS:
        inputs = torch.ones(rows, _SHAPE[1], dtype=dtype)
        tries = []
        for _ in range(_TRIES):
            began = perf_counter_ns()
            torch.nn.functional.linear(inputs, weight)
            tries.append(perf_counter_ns() - began)
        total += min(tries)
    return total
